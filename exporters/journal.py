"""What a search has measured so far, in a file beside its output, so that one that was cut off goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import OutputExists

_KIND = "edgekit search 3"


class Journal:
    """`measured` is what an earlier search of the same kind (`of`) knew: nothing if there was none."""

    def __init__(self, path: Path, of: Mapping[str, Any]) -> None:
        self._path, self._of = path, dict(of)
        written = _written(path)
        self.measured: dict[str, Any] = written["measured"] if written.get("of") == self._of else {}

    def write(self, measured: Mapping[str, Any]) -> None:
        aside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            aside.write_text(json.dumps({"kind": _KIND, "of": self._of, "measured": measured}))
            aside.replace(self._path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def forget(self) -> None:
        """The search has ended: nothing is left to go on with."""
        self._path.unlink(missing_ok=True)


def _written(path: Path) -> dict[str, Any]:
    """The record of some search, or nothing; whatever else is there is not ours to replace."""
    try:
        written = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        written = None
    if isinstance(written, dict) and str(written.get("kind")).startswith(_KIND.rpartition(" ")[0]):
        return written if written["kind"] == _KIND else {}
    raise OutputExists(
        f"{path} is where the search keeps what it has measured, and what is there was not written by it; "
        "move it away or choose another -o"
    )
