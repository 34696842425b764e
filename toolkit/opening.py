"""What a command is given: a bundle, or an .onnx file that is first adopted into one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.bundle import Bundle


@contextmanager
def opened(path: str, progress: Callable[[str], None]) -> Iterator[Bundle]:
    if not path.lower().endswith(".onnx"):
        yield Bundle.open(path)
        return
    from exporters.adopt import adopt

    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
        yield adopt(path, Path(folder) / "adopted.bundle", progress=progress).bundle
