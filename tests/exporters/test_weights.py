"""Graphs in memory that are too large to be handed over as a message."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from exporters import pace, weights
from exporters.adopt import adopt
from exporters.graph import signature_of
from exporters.optimize import optimize
from runtime.session import Session
from runtime.verify import verify_bundle

from ..helpers import make_model, save


def two_products() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "first"], ["h"]),
        onnx.helper.make_node("Identity", ["h"], ["same"]),
        onnx.helper.make_node("MatMul", ["same", "second"], ["g"]),
        onnx.helper.make_node("Add", ["g", "bias"], ["y"]),
    ]
    sizes = {"first": (64, 64), "second": (64, 64), "bias": (64,)}
    arrays = {name: random.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    shape = (onnx.TensorProto.FLOAT, ["batch", 64])
    return make_model(nodes, arrays, inputs={"x": shape}, outputs={"y": shape})


def test_a_session_from_a_file_answers_as_one_from_the_message_and_outlives_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = two_products()
    before = model.SerializeToString()
    message = weights.for_session(model, tmp_path / "none")
    assert message == before
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr(weights, "LARGE", 0)
    path = weights.for_session(model, tmp_path / "graph")
    assert isinstance(path, Path)
    assert path.stat().st_size < 2000
    assert model.SerializeToString() == before  # which keeps its weights
    sessions = [Session(data, signature_of(model), device="cpu") for data in (message, path)]
    shutil.rmtree(tmp_path / "graph")
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    one, other = (session.run({"x": x})["y"] for session in sessions)
    np.testing.assert_array_equal(one, other)


def test_optimize_tries_and_times_large_graphs_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Recorded(Session):
        def __init__(self, data: Any, *arguments: Any, **options: Any) -> None:
            given.append(data)
            super().__init__(data, *arguments, **options)

    for module in (pace, weights):
        monkeypatch.setattr(module, "Session", Recorded)
    monkeypatch.setattr(weights, "LARGE", 0)
    bundle = adopt(save(two_products(), tmp_path / "net.onnx"), tmp_path / "net.bundle").bundle
    report = optimize(bundle, tmp_path / "lean.bundle", timing=True)
    assert len(given) > 5
    assert all(isinstance(data, Path) for data in given)
    assert not any(data.exists() for data in given)
    assert [result.name for result in report.passes if result.applied]
    assert verify_bundle(tmp_path / "lean.bundle")
