from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from runtime.errors import OutputExists
from runtime.files import new_directory, sha256_of, write_file

from ..helpers import leftovers


def test_a_directory_appears_whole(tmp_path: Path) -> None:
    with new_directory(tmp_path / "deep" / "new", marker="m") as aside:
        (aside / "m").write_text("x")
        assert not (tmp_path / "deep").exists()
    assert (tmp_path / "deep" / "new" / "m").read_text() == "x"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_a_directory_that_failed_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_directory(tmp_path / "new", marker="m") as aside:
        (aside / "half").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_the_loser_of_two_writers_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputExists), new_directory(tmp_path / "new", marker="m") as slow:
        (slow / "m").write_text("slow")
        with new_directory(tmp_path / "new", marker="m") as quick:
            (quick / "m").write_text("quick")
    assert (tmp_path / "new" / "m").read_text() == "quick"
    assert leftovers(tmp_path) == []


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    dead = tmp_path / ".new.partial-999999999-abc"
    alive = tmp_path / f".new.partial-{os.getppid()}-abc"
    dead.mkdir()
    alive.mkdir()
    with new_directory(tmp_path / "new", marker="m") as aside:
        (aside / "m").touch()
    assert not dead.exists()
    assert alive.exists()


def test_what_was_being_replaced_when_the_process_was_killed_comes_back(tmp_path: Path) -> None:
    old = tmp_path / ".new.replaced-999999999"
    old.mkdir()
    (old / "m").write_text("old")
    with pytest.raises(OutputExists), new_directory(tmp_path / "new", marker="m"):
        pass
    assert (tmp_path / "new" / "m").read_text() == "old"


def test_partial_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".file.partial-999999999-abc").write_text("half")
    write_file(tmp_path / "file", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_is_replaced_in_one_step_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_file(target, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)  # a full disk is one of the few things this machine cannot have
    with pytest.raises(OSError, match="No space"):
        write_file(target, "new")
    assert target.read_text() == "old"
    assert leftovers(tmp_path) == []


def test_hash_of_a_known_text(tmp_path: Path) -> None:
    (tmp_path / "abc").write_text("abc")
    assert sha256_of(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
