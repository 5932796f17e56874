"""Where tables are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetune_kernels import paths
from moetune_kernels.errors import TableError


def test_the_order_is_the_named_folder_then_the_users_then_the_shipped(monkeypatch, tmp_path):
    monkeypatch.setenv("MOETUNE_CONFIG_DIR", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    expected = (tmp_path / "named", tmp_path / "data/moetune/tables", paths.shipped_tables_dir())
    assert paths.search_dirs() == expected


def test_without_settings_the_users_folder_is_under_home(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("MOETUNE_CONFIG_DIR", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.search_dirs()[0] == tmp_path / ".local/share/moetune/tables"


def test_a_relative_data_home_is_ignored_as_the_xdg_rules_say(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.user_tables_dir() == tmp_path / ".local/share/moetune/tables"


def test_a_user_without_a_home_still_has_the_shipped_tables(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("MOETUNE_CONFIG_DIR", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert paths.search_dirs() == (paths.shipped_tables_dir(),)
    with pytest.raises(TableError, match="XDG_DATA_HOME"):
        paths.user_tables_dir()


def test_shipped_tables_are_the_checkouts_or_the_wheels(monkeypatch, tmp_path):
    package = tmp_path / "kernels" / "moetune_kernels"
    package.mkdir(parents=True)
    monkeypatch.setattr(paths, "_PACKAGE_DIR", package)
    assert paths.shipped_tables_dir() == tmp_path / "tuned_configs"
    (package / "tuned_configs").mkdir()
    assert paths.shipped_tables_dir() == package / "tuned_configs"
