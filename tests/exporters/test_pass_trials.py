from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from exporters.adopt import adopt
from exporters.graph import read_model, signature_of
from exporters.pass_trials import Trial, Trials, _other_sizes, _step, length_axes, trials_of, workload_of
from runtime.signature import GraphSignature, StateSpec, TensorSpec

from ..helpers import gemm_model, make_model, save

GROWING = GraphSignature(
    (
        TensorSpec("tokens", "int64", ("batch", "time")),
        TensorSpec("past", "float32", ("batch", 2, "past", 3)),
        TensorSpec("memory", "float32", ("batch", "source", 3)),
    ),
    (TensorSpec("logits", "float32", ("batch", "time", 5)), TensorSpec("present", "float32", ("batch", 2, "past + time", 3))),
    (StateSpec("past", "present", batch_axis=0, length_axis=2),),
)
SIZES = {"batch": 3, "time": 4, "past": 6, "source": 2}


def test_a_state_that_grows_is_tried_empty() -> None:
    assert length_axes(GROWING) == {"past"}
    sizes = _other_sizes(GROWING, SIZES)
    assert SIZES | {"past": 0} in sizes
    assert SIZES | {"time": 0} not in sizes
    assert {"batch": 4, "time": 6, "past": 9, "source": 6} in sizes
    for axis, size in SIZES.items():
        assert SIZES | {axis: 1} in sizes
        assert SIZES | {axis: size + 1} in sizes


def decoder(positions: int) -> onnx.ModelProto:
    """Reads a table of so many positions at past + time."""
    nodes = [
        helper.make_node("Concat", ["past", "tokens"], ["present"], axis=1),
        helper.make_node("Shape", ["present"], ["total"], start=1, end=2),
        helper.make_node("Squeeze", ["total"], ["count"]),
        helper.make_node("Sub", ["count", "one"], ["last"]),
        helper.make_node("Gather", ["table", "last"], ["place"]),
        helper.make_node("Cast", ["tokens"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["numbers", "place"], ["logits"]),
    ]
    return make_model(
        nodes,
        {"table": np.arange(positions, dtype=np.float32), "one": np.array(1)},
        inputs={"tokens": (TensorProto.INT64, ["batch", "time"]), "past": (TensorProto.INT64, ["batch", "past"])},
        outputs={"logits": (TensorProto.FLOAT, ["batch", "time"]), "present": (TensorProto.INT64, ["batch", "total"])},
    )


def workload(positions: int, *, states: bool = True) -> list[dict[str, int]]:
    model = decoder(positions)
    state = StateSpec("past", "present", batch_axis=0, length_axis=1)
    signature = signature_of(model, (state,) if states else ())
    sizes = [{"batch": 2, "time": 4, "past": 3}, {"batch": 1, "time": 4, "past": 3}]
    goldens = [
        Trial("", one, {"tokens": np.ones((one["batch"], 4), np.int64), "past": np.ones((one["batch"], 3), np.int64)}, {})
        for one in sizes
    ]
    found = workload_of(Trials(signature, {}, tuple(goldens), ()), model)
    for one, inputs in found:
        assert signature.check_feeds(inputs) == one
    return [dict(one) for one, _ in found]


def test_a_decoder_is_timed_on_goldens_on_a_long_row_and_on_a_step() -> None:
    assert workload(200) == [
        {"batch": 1, "time": 4, "past": 3},
        {"batch": 2, "time": 4, "past": 3},
        {"batch": 1, "time": 64, "past": 64},
        {"batch": 1, "time": 1, "past": 3},
    ]


def test_a_long_row_is_no_longer_than_the_network_takes() -> None:
    assert workload(70)[2] == {"batch": 1, "time": 32, "past": 32}
    assert workload(20)[2] == {"batch": 1, "time": 1, "past": 3}  # no long row at all


def test_a_graph_without_states_has_no_step() -> None:
    assert workload(200, states=False)[2:] == [{"batch": 1, "time": 64, "past": 64}]


def test_images_are_timed_at_their_goldens_alone() -> None:
    kind = {"x": (TensorProto.FLOAT, ["batch", 3, "height", 8])}
    model = make_model([helper.make_node("Relu", ["x"], ["y"])], inputs=kind, outputs={"y": kind["x"]})
    goldens = [Trial("", {"batch": n, "height": 5}, {"x": np.ones((n, 3, 5, 8), np.float32)}, {}) for n in (1, 2, 4)]
    found = workload_of(Trials(signature_of(model), {}, tuple(goldens), ()), model)
    assert [dict(sizes) for sizes, _ in found] == [{"batch": 1, "height": 5}, {"batch": 4, "height": 5}]


def test_a_graph_is_tried_on_its_goldens_and_at_other_sizes(tmp_path: Path) -> None:
    bundle = adopt(save(gemm_model(), tmp_path / "g.onnx"), tmp_path / "g.bundle").bundle
    model = read_model(bundle.graph_path())
    trials = trials_of(bundle, "model", model)
    assert [item.label for item in trials.goldens] == [entry.file for entry in bundle.manifest.goldens]
    largest = max(item.sizes["batch"] for item in trials.goldens)
    assert {item.sizes["batch"] for item in trials.others} == {1, largest + 1}
    error, failed, _ = trials.judge(model)
    assert failed is None
    assert error <= trials.allowed["y"]


def test_a_wrong_graph_fails_and_says_where(tmp_path: Path) -> None:
    bundle = adopt(save(gemm_model(), tmp_path / "g.onnx"), tmp_path / "g.bundle").bundle
    model = read_model(bundle.graph_path())
    trials = trials_of(bundle, "model", model)
    wrong = onnx.ModelProto()
    wrong.CopyFrom(model)
    wrong.graph.node[0].attribute.append(onnx.helper.make_attribute("alpha", 1.01))
    error, failed, found = trials.judge(wrong)
    assert failed is not None
    assert (failed.output, found) == ("y", trials.goldens[0])
    assert error > failed.allowed


def test_the_step_that_is_timed_wants_the_logits_of_the_only_token_it_has() -> None:
    inputs = (TensorSpec("tokens", "int64", ("batch", "time")), TensorSpec("wanted", "int64", ("kept",)))
    signature = GraphSignature(inputs, ())
    golden = Trial(
        "golden", {"batch": 2, "time": 5, "kept": 2}, {"tokens": np.ones((2, 5), int), "wanted": np.array([3, 1])}, {}
    )
    sizes, feeds = _step(signature, golden)
    assert sizes == {"batch": 1, "time": 1, "kept": 1}
    assert feeds["tokens"].shape == (1, 1)
    assert feeds["wanted"].tolist() == [0]
