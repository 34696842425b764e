"""What is read of a graph without the shapes of its values."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest

from exporters.rewrites import nodes


def residual(blocks: int) -> ir.Value:
    """x + relu(x), again and again; only the first x has a shape."""
    value = ir.Value(name="x", shape=ir.Shape(["batch", "time", 8]), type=ir.TensorType(ir.DataType.FLOAT))
    for _ in range(blocks):
        changed = ir.Node("", "Relu", [value]).outputs[0]
        value = ir.Node("", "Add", [value, changed]).outputs[0]
    return value


@pytest.mark.parametrize(("ask", "answer"), [(nodes.rank, 3), (lambda value: nodes.size(value, -1), 8)])
def test_a_deep_network_is_followed_once_and_not_along_every_path(
    ask: Callable[[ir.Value], int | None], answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = nodes._alike, []

    def counted(node: ir.Node) -> list[ir.Value]:
        seen.append(node)
        assert len(seen) <= 80
        return original(node)

    monkeypatch.setattr(nodes, "_alike", counted)
    assert ask(residual(40)) == answer
    assert len(seen) == 80
