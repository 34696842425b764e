"""The tracer's translations of PyTorch operators, read once a process.

torch.onnx parses the sources of some five hundred of them for every graph it exports, which takes longer than tracing a small
network does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.onnx._internal.exporter import _registration

_read: dict[tuple[Any, ...], Any] = {}  # by the arguments: the opset


@contextmanager
def translations_read_once() -> Iterator[None]:
    """Within the block torch.onnx.export takes the translations that an earlier one read. Nothing may be registered there."""
    registry = _registration.ONNXRegistry
    original = registry.__dict__["from_torchlib"]

    def from_torchlib(cls: Any, *arguments: Any, **options: Any) -> Any:
        key = (cls, arguments, tuple(sorted(options.items())))
        if key not in _read:
            _read[key] = original.__get__(None, cls)(*arguments, **options)
        return _read[key]

    registry.from_torchlib = classmethod(from_torchlib)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        registry.from_torchlib = original  # type: ignore[method-assign]
