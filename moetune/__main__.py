"""``python -m moetune`` and the ``moetune`` script: the same command line."""

from __future__ import annotations

import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Load the command line and run it; Ctrl-C while it loads is no traceback either."""
    try:
        from moetune.cli.main import main as run

        run()
    except ModuleNotFoundError as error:  # a checkout on the path of a Python that never installed the project
        sys.stderr.write(f"error: {error.name} is not installed for {sys.executable}; run `pip install typer rich`\n")
        sys.exit(3)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":  # a started worker process imports this module again and must not start a second command
    main()
