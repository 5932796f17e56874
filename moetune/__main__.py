"""``python -m moetune`` and the ``moetune`` script: the same command line."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Load the command line and run it; Ctrl-C while it loads is no traceback either."""
    # A search solves systems of at most 320 unknowns, a millisecond each. OpenBLAS would spread them over all cores, where
    # its threads spin while others compile: on two busy cores the searches of a sweep took 18.7 s, with one thread 4.3 s.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
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
