"""A report's file is whole or not there, and no file is lost to another."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from bridge_memory.report.write import write_text
from bridge_memory.spec import SpecError


def test_a_new_file_holds_the_text_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_text(str(tmp_path / "report.txt"), "peak\n", force=False)
    assert (tmp_path / "report.txt").read_text() == "peak\n"
    assert os.listdir(tmp_path) == ["report.txt"]


def test_a_file_is_replaced_only_when_told_to(tmp_path: Path) -> None:
    target = tmp_path / "report.txt"
    target.write_text("old")
    with pytest.raises(SpecError, match=r"--output .*report\.txt exists.*--force") as caught:
        write_text(str(target), "new", force=False)
    assert "\n" not in str(caught.value)
    assert target.read_text() == "old"
    write_text(str(target), "new", force=True)
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["report.txt"]


@pytest.mark.parametrize("force", (False, True))
def test_what_cannot_be_written_is_one_line(tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "missing" / "report.txt", tmp_path / "file" / "report.txt", "", "a\0b"):
        with pytest.raises(SpecError, match=r"^--output") as caught:
            write_text(str(path), "text", force=force)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SpecError, match="--output"):
        write_text(str(tmp_path / "report.txt"), "text", force=False)


def test_a_failing_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the text is flushed: the old report stays, and no half of a new one."""
    target = tmp_path / "report.txt"
    target.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpecError, match="No space left on device"):
        write_text(str(target), "new", force=True)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.txt"]


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.txt"
    monkeypatch.setattr(os, "fsync", lambda _: target.write_text("another's"))
    with pytest.raises(SpecError, match=r"exists.*--force"):
        write_text(str(target), "ours", force=False)
    assert target.read_text() == "another's"
    assert os.listdir(tmp_path) == ["report.txt"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    write_text(str(tmp_path / "link.txt"), "new", force=True)
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"


def test_modes_are_those_of_an_ordinary_write(tmp_path: Path) -> None:
    """A temporary file is 0600; the report must be as readable as any other new file, and keep its mode later."""
    (tmp_path / "plain").write_text("")
    write_text(str(tmp_path / "report"), "text", force=False)
    assert mode(tmp_path / "report") == mode(tmp_path / "plain")
    (tmp_path / "report").chmod(0o640)
    write_text(str(tmp_path / "report"), "text", force=True)
    assert mode(tmp_path / "report") == 0o640


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
