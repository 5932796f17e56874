"""``python -m moetune``: the same command line as ``moetune``."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # a started worker process imports this module again and must not start a second command
    try:
        from moetune.cli.main import main
    except ModuleNotFoundError as error:  # a checkout on the path of a Python that never installed the project
        sys.stderr.write(f"error: {error.name} is not installed for {sys.executable}; run `pip install typer rich`\n")
        sys.exit(3)
    main()
