from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper

import exporters.optimize
import runtime
from exporters.adopt import adopt
from exporters.optimize import PASSES, Pass, optimize
from exporters.pace import Pace
from exporters.rewrites import fuse_gelu
from exporters.rewrites.engine import Rewritten, apply
from runtime.bundle import Bundle
from runtime.statistics import Estimate
from runtime.verify import verify_bundle

from ..helpers import make_model, save
from .rewrites.test_fuse_gelu import CONSTANTS, node

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


def gelu_bundle(folder: Path) -> Bundle:
    """Two GELUs written out, one after the other."""
    nodes = []
    for x, y in (("x", "middle"), ("middle", "y")):
        nodes += [
            node("Div", [x, "root"], f"scaled.{y}"),
            node("Erf", [f"scaled.{y}"], f"erf.{y}"),
            node("Add", [f"erf.{y}", "one"], f"plus.{y}"),
            node("Mul", [x, "half"], f"h.{y}"),
            node("Mul", [f"h.{y}", f"plus.{y}"], y),
        ]
    weights = {name: np.float32(CONSTANTS[name]) for name in ("root", "one", "half")}
    model = make_model(nodes, weights, outputs=OUT)
    return adopt(save(model, folder / "gelu.onnx"), folder / "gelu.bundle").bundle


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


def relu_for_the_second(found: fuse_gelu.Gelu, context: Any) -> dict[Any, Any]:
    """Right in the first place, wrong in the second."""
    if found.root.outputs[0].name == "middle":
        return dict(fuse_gelu.replacement(found, context))
    return {found.root.outputs[0]: onnx_ir.node("Relu", [found.x]).outputs[0]}


def test_the_smallest_subgraph_that_shows_a_difference_is_named(tmp_path: Path) -> None:
    wrong = replace(fuse_gelu.REWRITE, replacement=relu_for_the_second)
    planted = Pass("wrong-gelu", "", lambda model: apply(wrong, model))
    report = optimize(gelu_bundle(tmp_path), tmp_path / "out.bundle", passes=(planted,))
    (result,) = report.passes
    assert result.matches == 2
    assert "output 'y' at goldens/model-0.npz needs a tolerance of" in result.outcome
    assert result.outcome.endswith("smallest subgraph: Div_scaled.y, Erf_erf.y, Add_plus.y, Mul_h.y, Mul_y → Relu_y")
    assert not report.changed
    assert verify_bundle(tmp_path / "out.bundle")


def bakes_the_batch(model: onnx.ModelProto) -> onnx.ModelProto:
    """Right up to four rows, the most a golden has."""
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((4, 1), np.float32), "baked"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "first"))
    shape = helper.make_node("Shape", ["x"], ["n"], start=0, end=1)
    part = helper.make_node("Slice", ["baked", "first", "n"], ["zeros"])
    total = helper.make_node("Add", ["x", "zeros"], ["x0"])
    for item in model.graph.node:
        item.input[:] = ["x0" if name == "x" else name for name in item.input]
    for item in (total, part, shape):
        model.graph.node.insert(0, item)
    return model


def test_a_pass_that_is_wrong_only_at_sizes_without_goldens_is_reverted_too(tmp_path: Path) -> None:
    bundle = gelu_bundle(tmp_path)
    assert max(len(inputs["x"]) for _, inputs, _ in bundle.goldens()) == 4
    baking = Pass("baking", "", lambda model: Rewritten(bakes_the_batch(model), 1, ()))
    (result,) = optimize(bundle, tmp_path / "out.bundle", passes=(baking,)).passes
    assert result.outcome.startswith("reverted: onnxruntime could not run the graph on these inputs")


def test_a_fused_graph_says_how_many_places_changed_and_needs_onnxruntime(tmp_path: Path) -> None:
    report = optimize(gelu_bundle(tmp_path), tmp_path / "out.bundle")
    gelu = next(item for item in report.passes if item.name == "fuse-gelu")
    assert (gelu.outcome, gelu.matches, gelu.nodes_before, gelu.nodes_after) == ("applied", 2, 10, 2)
    assert Bundle.open(tmp_path / "out.bundle").manifest.requirements["operators"] == ["Gelu"]


def slower(ratio: float, only: str | None = None) -> Any:
    """A stop-watch that says `ratio` of every pass, or of graphs that have the operator `only`."""

    def pace(before: onnx.ModelProto, after: onnx.ModelProto, *_: Any, **options: Any) -> tuple[Pace, ...]:
        hit = only is None or any(item.op_type == only for item in after.graph.node)
        value = ratio if hit else 1.0
        estimate = Estimate(value, value - 0.01, value + 0.01)
        return (Pace("batch=3", Estimate(10.0, 9.9, 10.1), Estimate(10 * value, None, None), estimate),)

    return pace


def test_a_pass_that_measures_slower_is_reverted_and_says_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters.optimize, "compare_pace", slower(1.08, only="Gelu"))
    report = optimize(gelu_bundle(tmp_path), tmp_path / "out.bundle", timing=True)
    gelu = next(item for item in report.passes if item.name == "fuse-gelu")
    assert gelu.outcome == "reverted: 1.08 times slower at batch=3"
    assert not report.changed
    assert Bundle.open(tmp_path / "out.bundle").manifest.requirements["operators"] == ["Add", "Div", "Erf", "Mul"]


def test_a_pass_within_the_noise_is_kept_and_its_latency_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters.optimize, "compare_pace", slower(1.02))
    report = optimize(gelu_bundle(tmp_path), tmp_path / "out.bundle", timing=True)
    assert next(item for item in report.passes if item.name == "fuse-gelu").pace[0].ratio.median == 1.02
    (graph,) = report.graphs
    assert (graph.nodes_before, graph.nodes_after, graph.pace[0].sizes) == (10, 2, "batch=3")
    assert report.to_json()["graphs"][0]["pace"][0]["ratio"]["median"] == 1.02


@pytest.mark.parametrize(("ratio", "kept"), [(1.0, False), (0.95, True)])
def test_a_pass_for_onnxruntime_only_must_be_faster(
    ratio: float, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporters.optimize, "compare_pace", slower(ratio))
    foreign = Pass("foreign", "", lambda model: apply(fuse_gelu.REWRITE, model), standard=False, timed=True)
    (result,) = optimize(gelu_bundle(tmp_path), tmp_path / "out.bundle", passes=(foreign,), timing=True).passes
    reason = "reverted: not faster (1.00 of the time at best), and only onnxruntime could run it"
    assert result.outcome == ("applied" if kept else reason)


def test_passes_that_are_slower_together_are_all_reverted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters.optimize, "compare_pace", slower(1.5))
    report = optimize(fat_bundle(tmp_path), tmp_path / "out.bundle", timing=True)
    assert not report.changed
    reverted = [item.outcome for item in report.passes if item.outcome != "nothing to do"]
    assert set(reverted) == {"reverted: all passes together are 1.50 times slower at batch=3"}
    assert report.graphs[0].nodes_after == 5


def test_without_timing_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters.optimize, "compare_pace", lambda *_, **options: pytest.fail("measured"))
    report = optimize(fat_bundle(tmp_path), tmp_path / "out.bundle")
    assert all(graph.pace == () for graph in report.graphs)
