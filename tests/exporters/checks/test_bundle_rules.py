"""Rules that need all graphs of a bundle: work done anew at every step, and outputs nobody takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from exporters.check import check
from runtime.signature import StateSpec

from ...helpers import make_model
from .support import FLOAT, INT64, bundle_of, findings, severities, weights

ROW = (FLOAT, ["batch", 4])
MEMORY = (FLOAT, ["batch", "source", 4])


def encoder(*extra: str) -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", ["x"], ["memory"]), *(helper.make_node("Neg", ["x"], [name]) for name in extra)]
    return make_model(nodes, inputs={"x": MEMORY}, outputs=dict.fromkeys(("memory", *extra), MEMORY))


def decoder(*, projects: bool) -> onnx.ModelProto:
    """A step over hidden (batch, 4) that reads the memory, through a projection or as it is."""
    nodes = [
        helper.make_node("MatMul", ["memory", "W"], ["keys"], name="project")
        if projects
        else helper.make_node("Neg", ["memory"], ["keys"]),
        helper.make_node("ReduceMean", ["keys", "axes"], ["context"], keepdims=0),
        helper.make_node("MatMul", ["hidden", "W"], ["moved"], name="recur"),
        helper.make_node("Add", ["moved", "context"], ["next_hidden"]),
    ]
    constants = {"W": weights(4, 4), "axes": np.array([1], np.int64)}
    return make_model(nodes, constants, inputs={"hidden": ROW, "memory": MEMORY}, outputs={"next_hidden": ROW})


STATES = {"decoder": (StateSpec("hidden", "next_hidden", 0),)}


def test_what_follows_from_the_encoder_alone_is_found_in_a_step(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, {"encoder": encoder(), "decoder": decoder(projects=True)}, STATES)
    (found,) = findings(bundle, tmp_path, "recomputed-memory")
    assert (found.severity, found.graph, found.node) == ("warning", "decoder", "project")
    assert found.reason == "every step computes this from 'memory' alone, which 'encoder' made once"


def test_cheap_work_on_the_memory_and_graphs_without_steps_are_left_alone(tmp_path: Path) -> None:
    graphs = {"encoder": encoder(), "decoder": decoder(projects=False)}
    assert not findings(bundle_of(tmp_path, graphs, STATES), tmp_path, "recomputed-memory")
    (tmp_path / "other").mkdir()
    graphs = {"encoder": encoder(), "decoder": decoder(projects=True)}
    assert not findings(bundle_of(tmp_path / "other", graphs), tmp_path, "recomputed-memory")


@pytest.mark.parametrize(("extra", "expected"), [(("spare",), ["spare"]), ((), [])])
def test_an_output_that_no_graph_takes(extra: tuple[str, ...], expected: list[str], tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, {"encoder": encoder(*extra), "decoder": decoder(projects=False)}, STATES)
    found = findings(bundle, tmp_path, "unread-outputs")
    assert [(finding.graph, finding.node) for finding in found] == [("encoder", name) for name in expected]
    assert set(severities(found)) <= {"info"}


def test_findings_of_several_graphs_say_which(tmp_path: Path) -> None:
    report = check(bundle_of(tmp_path, {"encoder": encoder(), "decoder": decoder(projects=False)}, STATES))
    assert {finding.graph for finding in report.findings} == {"encoder", "decoder"}
    assert set(report.figures) == {"encoder", "decoder"}


def test_outputs_that_are_constant_or_copies_of_an_input(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Identity", ["c"], ["fixed"]),
        helper.make_node("Identity", ["x"], ["copy"]),
        helper.make_node("Relu", ["x"], ["y"]),
    ]
    model = make_model(nodes, {"c": weights(4)}, outputs={"y": ROW, "fixed": (FLOAT, [4]), "copy": ROW})
    found = findings(model, tmp_path, "unused")
    assert [(finding.node, finding.severity) for finding in found] == [("fixed", "warning"), ("copy", "info")]
    assert "copy of the input 'x'" in found[1].reason


def test_index_arithmetic_on_shapes_is_not_a_hot_path(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["size"]),
        helper.make_node("Mul", ["size", "size"], ["square"]),
        helper.make_node("Add", ["steps", "steps"], ["offsets"]),
        helper.make_node("Add", ["tokens", "tokens"], ["twice"], name="per_token"),
        helper.make_node("Add", ["pairs", "pairs"], ["distances"], name="per_pair"),
    ]
    grid, line, cube = (INT64, ["batch", "time"]), (INT64, ["time"]), (INT64, ["batch", "time", "time"])
    inputs = {"x": ROW, "tokens": grid, "steps": line, "pairs": cube}
    model = make_model(
        nodes, inputs=inputs, outputs={"square": (INT64, [2]), "offsets": line, "twice": grid, "distances": cube}
    )
    found = findings(model, tmp_path, "int64-indices")
    assert [(finding.severity, finding.node) for finding in found] == [("warning", "per_pair"), ("info", "per_token")]
