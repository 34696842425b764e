from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import runtime
from exporters.adopt import adopt
from exporters.optimize import PASSES, Pass, optimize
from runtime.bundle import Bundle
from runtime.verify import verify_bundle

from ..helpers import make_model, save

OUT = {"y": (TensorProto.FLOAT, ["batch", 4])}


def fat_bundle(folder: Path) -> Bundle:
    """One of each: a constant to fold, an identity, a twin weight, a lost weight."""
    ones = np.full(4, 1.5, np.float32)
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["square"]),
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Add", ["same", "square"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["g"]),
        helper.make_node("Add", ["g", "c"], ["y"]),
    ]
    model = make_model(nodes, {"a": ones, "b": ones * 3, "c": ones * 3, "lost": np.ones(100, np.float32)}, outputs=OUT)
    return adopt(save(model, folder / "fat.onnx"), folder / "fat.bundle").bundle


def test_every_pass_does_its_work_and_the_answers_stay(tmp_path: Path) -> None:
    bundle = fat_bundle(tmp_path)
    report = optimize(bundle, tmp_path / "lean.bundle")
    assert report.changed
    assert report.bytes_after < report.bytes_before
    model = onnx.load(str(tmp_path / "lean.bundle" / "model.onnx"))
    assert [node.op_type for node in model.graph.node] == ["Add", "Add", "Add"]
    assert "lost" not in {tensor.name for tensor in model.graph.initializer}
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    before, after = (runtime.load(path).run({"x": x})["y"] for path in (bundle.root, tmp_path / "lean.bundle"))
    np.testing.assert_array_equal(before, after)
    assert verify_bundle(tmp_path / "lean.bundle")


def test_a_second_time_there_is_nothing_to_do_and_that_is_said(tmp_path: Path) -> None:
    optimize(fat_bundle(tmp_path), tmp_path / "lean.bundle")
    again = optimize(Bundle.open(tmp_path / "lean.bundle"), tmp_path / "leaner.bundle")
    assert not again.changed
    assert {item.outcome for item in again.passes} == {"nothing to do"}


def breaks_numbers(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.node[0].op_type = "Add"
    return model


def breaks_the_graph(model: onnx.ModelProto) -> onnx.ModelProto:
    del model.graph.node[0]
    return model


def raises(model: onnx.ModelProto) -> onnx.ModelProto:
    raise RuntimeError("no idea what this is")


@pytest.mark.parametrize(
    ("harmful", "reason"),
    [(breaks_numbers, "needs a tolerance"), (breaks_the_graph, "cannot load"), (raises, "it failed with RuntimeError")],
)
def test_a_pass_that_breaks_parity_is_reverted_and_named(harmful, reason: str, tmp_path: Path) -> None:
    passes = (Pass("harmful", "", harmful), *PASSES)
    report = optimize(fat_bundle(tmp_path), tmp_path / "lean.bundle", passes=passes)
    assert report.passes[0].outcome.startswith("reverted")
    assert reason in report.passes[0].outcome
    assert any(item.applied for item in report.passes[1:])
    assert verify_bundle(tmp_path / "lean.bundle")
