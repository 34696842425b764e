"""What a command is given: a bundle, or an .onnx file that is first adopted into one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.bundle import Bundle, Manifest
from runtime.errors import OptionError

_ON_TEXT = ("embedding", "language-model", "masked-lm", "seq2seq")


def takes_text(manifest: Manifest) -> bool:
    return manifest.task in _ON_TEXT or bool(manifest.tokenizers)


def refuse_text(bundle: Bundle, verb: str, instead: str) -> None:
    """For commands that work on images and columns so far."""
    if takes_text(bundle.manifest):
        raise OptionError(
            f"{verb} works on networks on images and columns so far, and {bundle.root.name} takes text "
            f"(its task is {bundle.manifest.task}); {instead}"
        )


@contextmanager
def opened(path: str, progress: Callable[[str], None]) -> Iterator[Bundle]:
    if not path.lower().endswith(".onnx"):
        yield Bundle.open(path)
        return
    from exporters.adopt import adopt

    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
        yield adopt(path, Path(folder) / Path(path).name, progress=progress).bundle
