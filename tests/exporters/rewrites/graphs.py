"""Tiny graphs for rewrites, and the one claim made of each: so many matches, and the same numbers at two sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from exporters.graph import clean, operators_of, signature_of
from exporters.rewrites.engine import Rewrite, Rewritten, apply
from runtime.session import Session

from ...helpers import make_model

FLOAT = TensorProto.FLOAT
# "time + past" follows from the others; a graph that wants it as an input names it "total"
SIZES = (
    {"batch": 2, "time": 5, "past": 3, "total": 8, "source": 4},
    {"batch": 3, "time": 1, "past": 0, "total": 1, "source": 7},
)


def node(operator: str, inputs: list[str], output: str | list[str], **attributes: Any) -> onnx.NodeProto:
    outputs = [output] if isinstance(output, str) else output
    return helper.make_node(operator, inputs, outputs, name=f"{operator}_{outputs[0]}", **attributes)


def graph(
    nodes: list[onnx.NodeProto],
    weights: Mapping[str, Any],
    *,
    inputs: Mapping[str, list[Any]] | None = None,
    outputs: Mapping[str, list[Any]] | None = None,
    opset: int = 20,
) -> onnx.ModelProto:
    """Float inputs and outputs, (batch, time, 8) unless given; weights that are numbers become float32 scalars."""
    arrays = {name: np.asarray(value, None if hasattr(value, "dtype") else np.float32) for name, value in weights.items()}
    shape: list[Any] = ["batch", "time", 8]
    model = make_model(
        nodes,
        arrays,
        inputs={name: (FLOAT, dims) for name, dims in (inputs or {"x": shape}).items()},
        outputs={name: (FLOAT, dims) for name, dims in (outputs or {"y": shape}).items()},
        opset=opset,
    )
    return clean(model)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rewritten(rewrite: Rewrite[Any], model: onnx.ModelProto, *, portable: bool = False) -> Rewritten:
    return apply(rewrite, model, portable=portable)


def check_fused(rewrite: Rewrite[Any], model: onnx.ModelProto, matches: int, *, portable: bool = False) -> onnx.ModelProto:
    """`matches` places were changed, and what comes out is the same at two sizes. Returns the new model."""
    result = apply(rewrite, model, portable=portable)
    assert (result.matches, result.refusals) == (matches, ())
    for seed, sizes in enumerate(SIZES):
        before, after = (_answers(item, sizes, seed) for item in (model, result.model))
        assert before.keys() == after.keys()
        for name in before:
            np.testing.assert_allclose(after[name], before[name], rtol=2e-5, atol=2e-6)
            assert np.abs(before[name]).max() > 1e-3  # numbers that are all zero would prove nothing
    return result.model


def check_left_alone(
    rewrite: Rewrite[Any], model: onnx.ModelProto, reason: str | None = None, *, portable: bool = False
) -> None:
    """Nothing was changed: the pattern is not there, or `reason` is why it was refused."""
    result = apply(rewrite, model, portable=portable)
    assert result.matches == 0
    assert result.refusals == (() if reason is None else (reason,))
    assert result.model is model


def operators(model: onnx.ModelProto) -> dict[str, int]:
    return dict(operators_of(model))


def _answers(model: onnx.ModelProto, sizes: Mapping[str, int], seed: int) -> dict[str, NDArray[Any]]:
    signature = signature_of(model)
    random = np.random.default_rng(seed)
    feeds = {}
    for spec in signature.inputs:
        shape = [dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape]
        feeds[spec.name] = random.standard_normal(shape).astype(np.float32)
    return Session(model.SerializeToString(), signature, device="cpu", optimization="none", log_level=4).run(feeds)
