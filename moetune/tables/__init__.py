"""Tuned tables on disk: writing them so that the runtime finds them, and checking them."""

from __future__ import annotations

from moetune.tables.check import check_path
from moetune.tables.writer import table_text, write_table

__all__ = ["check_path", "table_text", "write_table"]
