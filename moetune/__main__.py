"""``python -m moetune``: the same command line as ``moetune``."""

from __future__ import annotations

from moetune.cli.main import main

if __name__ == "__main__":  # a started worker process imports this module again and must not start a second command
    main()
