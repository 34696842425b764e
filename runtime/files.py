"""Files that appear whole or not at all, and the hashes that prove them.

Everything is written aside, under a hidden name beside its target, and renamed when complete. What a killed process left
aside is removed by the next one that writes the same target.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import OutputExists

_CHUNK = 1 << 20


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_file(target: Path, content: bytes | str) -> None:
    """Replace `target` with `content` in one step."""
    data = content.encode() if isinstance(content, str) else content
    _remove_leftovers(target.parent, target)
    descriptor, aside = tempfile.mkstemp(prefix=_prefix(target), dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(aside, 0o666 & ~_umask())
        os.replace(aside, target)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def refuse_existing(target: Path, *, force: bool, marker: str) -> None:
    """Raise OutputExists unless `target` is free, or `force` is given and it is of our own making (holds `marker`)."""
    if blocked := next((parent for parent in target.parents if parent.exists() and not parent.is_dir()), None):
        raise OutputExists(f"{target} cannot be written because {blocked} is a file; choose another -o")
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise OutputExists(f"{target} already exists; choose another -o, or pass --force to replace it")
    if target.is_symlink() or not (target.is_dir() and (target / marker).is_file()):
        raise OutputExists(
            f"{target} exists and has no {marker}, so it was not written by edgekit; --force will not replace it; "
            "remove it yourself or choose another -o"
        )


def refuse_unwritable(target: Path) -> None:
    """What takes minutes to make must not find out at the end that it cannot be written."""
    target = Path(os.path.abspath(target))
    home = next(parent for parent in target.parents if parent.is_dir())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=_prefix(target), dir=home))
    except OSError as error:
        raise OutputExists(f"{target} cannot be written: {error.strerror}; choose another place or name") from None


@contextmanager
def new_directory(target: Path, *, force: bool = False, marker: str) -> Iterator[Path]:
    """A directory to fill; it becomes `target` when the block ends well and vanishes when it does not.

    `marker` is the file that tells a directory of ours, the only kind that `force` replaces.
    """
    target = Path(os.path.abspath(target))
    home = next(parent for parent in target.parents if parent.is_dir())
    _restore_replaced(home, target)
    refuse_existing(target, force=force, marker=marker)
    _remove_leftovers(home, target)
    aside = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=home))
    try:
        yield aside
        os.chmod(aside, 0o777 & ~_umask())
        target.parent.mkdir(parents=True, exist_ok=True)
        refuse_existing(target, force=force, marker=marker)
        if target.exists():
            old = aside.with_name(f".{target.name}.replaced-{os.getpid()}")
            os.rename(target, old)
            try:
                os.rename(aside, target)
            except OSError:
                os.rename(old, target)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-{os.getpid()}-"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _remove_leftovers(home: Path, target: Path) -> None:
    pattern = re.compile(re.escape(f".{target.name}.partial-") + r"(\d+)-")
    for entry in home.iterdir():
        found = pattern.match(entry.name)
        if found and not _is_alive(int(found.group(1))):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _restore_replaced(home: Path, target: Path) -> None:
    """Put back what a process was replacing when it was killed between taking the old away and bringing the new."""
    for entry in home.glob(f".{glob.escape(target.name)}.replaced-*"):
        if not _is_alive(int(entry.name.rpartition("-")[2])):
            if target.exists():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                os.rename(entry, target)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
