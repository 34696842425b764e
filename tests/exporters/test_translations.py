"""The tracer's table of translations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.onnx._internal.exporter import _registration

from exporters import translations
from exporters.exportable import GraphSource
from exporters.trace import trace


def traced(opset: int) -> torch.onnx.ONNXProgram:
    graph = GraphSource(nn.Linear(3, 2).eval(), {"x": torch.ones(2, 3)}, {"x": {0: "batch"}}, ("y",))
    return trace(graph, "a layer", opset=opset)


def test_it_is_read_once_for_each_opset_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    original = _registration.ONNXRegistry.__dict__["from_torchlib"]
    read: list[Any] = []

    def counting(cls: Any, *arguments: Any, **options: Any) -> Any:
        read.append(options or arguments)
        return original.__get__(None, cls)(*arguments, **options)

    counter = classmethod(counting)
    monkeypatch.setattr(_registration.ONNXRegistry, "from_torchlib", counter)
    monkeypatch.setattr(translations, "_read", {})
    programs = [traced(opset) for opset in (20, 20, 21, 20)]
    assert len(read) == 2
    assert [program.model.opset_imports[""] for program in programs] == [20, 20, 21, 20]
    assert _registration.ONNXRegistry.__dict__["from_torchlib"] is counter
