"""RNN, GRU and LSTM in the schemes that take them: the answers of their operators with the weights that are stored."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from exporters.graph import copy_of, operators_of
from exporters.quantizers import SCHEMES, by_row, weights
from exporters.quantizers.blocks import unpack
from exporters.quantizers.recurrent import AUTO, FLOAT32, INT8, OPERATORS, arithmetic_of
from exporters.quantizers.rounding import WeightSettings, rounded
from exporters.quantizers.scheme import NodeDecision, Request, Scheme, decide, decide_all, quantizable
from runtime.errors import OptionError, QuantizationRefused

from .recurrent_models import Case

DIRECTIONS = ("forward", "reverse", "bidirectional")
KINDS = [("RNN", {}), ("RNN", {"relu": True}), ("GRU", {}), ("GRU", {"linear_before_reset": 1}), ("LSTM", {})]
SIZES = ((1, 1), (3, 1), (1, 6), (3, 7))
EXACT = 2e-5  # ten times what 32-bit sums of these sizes in another order came to


def case_of(kind: str, attributes: dict[str, Any], direction: str = "forward", **options: Any) -> Case:
    if attributes.get("relu"):
        attributes = {"activations": ["Relu"] * (2 if direction == "bidirectional" else 1)}
    return Case(kind, direction, attributes=attributes, **options)


def decisions(model: onnx.ModelProto, scheme: Scheme, wanted: WeightSettings | None = None) -> list[NodeDecision]:
    return decide_all(scheme, {"": quantizable(model)}, (), (), wanted)[""]


def applied(model: onnx.ModelProto, scheme: Scheme, recurrence: str = AUTO, **request: Any) -> onnx.ModelProto:
    changed = WeightSettings(recurrence=recurrence)
    named = quantizable(model)
    nodes = tuple(item.node for item in decide(scheme, named, (), ()) if item.quantized)
    operators = tuple({node.op_type for node in named.graph.node if node.name in nodes})
    return scheme.apply(Request(named, nodes, operators, False, None, settings=changed, **request))


def with_stored_weights(model: onnx.ModelProto, bits: int) -> onnx.ModelProto:
    """The operator in float32 with the weights that blocks stand for."""
    model = copy_of(model)
    for tensor in model.graph.initializer:
        if tensor.name in ("W", "R"):
            array = numpy_helper.to_array(tensor)
            rows = array.reshape(-1, array.shape[-1])
            stored = unpack(rounded(rows, bits, WeightSettings()), rows.shape[1]).reshape(array.shape)
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(stored), tensor.name))
    return model


def answers(model: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return dict(zip((item.name for item in session.get_outputs()), session.run(None, feeds), strict=True))


def assert_near(actual: dict[str, Any], expected: dict[str, Any], error: float) -> None:
    assert actual.keys() == expected.keys()
    for name, reference in expected.items():
        assert actual[name].shape == reference.shape
        np.testing.assert_allclose(actual[name], reference, atol=error, rtol=0, err_msg=name)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are not rounded."""
    monkeypatch.setattr(weights, "_INT8_ACTIVATIONS", 1)


# Exactness.


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("kind", "attributes"), KINDS)
def test_step_by_step_is_the_operator_with_the_stored_weights(
    kind: str, attributes: dict[str, Any], direction: str, lengths: bool
) -> None:
    case = case_of(kind, attributes, direction, lengths=lengths)
    model = case.model()
    quantized = applied(model, SCHEMES["int8-weights"], INT8)
    found = operators_of(quantized)
    assert found["Scan"] == 1
    assert not set(found) & set(OPERATORS)
    for batch, time in SIZES:
        feeds = case.feeds(batch, time)
        assert_near(answers(quantized, feeds), answers(with_stored_weights(model, 8), feeds), EXACT)


@pytest.mark.usefixtures("exact")
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_so_it_is_at_any_size_with_or_without_each_input_and_output(data: st.DataObject) -> None:
    kind, attributes = data.draw(st.sampled_from(KINDS))
    case = case_of(
        kind,
        attributes,
        data.draw(st.sampled_from(DIRECTIONS)),
        width=data.draw(st.integers(30, 70)),
        hidden=data.draw(st.integers(60, 80)),
        lengths=data.draw(st.booleans()),
        initial=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
        outputs=data.draw(st.sampled_from(["all", "last"])),
        opset=data.draw(st.sampled_from([11, 13, 18, 20])),
    )
    bits = data.draw(st.sampled_from([4, 8]))
    model = case.model(seed=data.draw(st.integers(0, 99)))
    quantized = applied(model, SCHEMES[f"int{bits}-weights"], data.draw(st.sampled_from([INT8, FLOAT32])))
    feeds = case.feeds(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9)), seed=data.draw(st.integers(0, 99)))
    assert_near(answers(quantized, feeds), answers(with_stored_weights(model, bits), feeds), EXACT)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("kind", "attributes"), KINDS)
def test_stored_weights_give_the_operator_what_they_stand_for(kind: str, attributes: dict[str, Any], bits: int) -> None:
    case = case_of(kind, attributes, "bidirectional", width=73, lengths=True)  # a width that no block divides
    model = case.model()
    quantized = applied(model, SCHEMES[f"int{bits}-weights"], FLOAT32)
    assert operators_of(quantized)[kind] == 1
    feeds = case.feeds(3, 6)
    assert_near(answers(quantized, feeds), answers(with_stored_weights(model, bits), feeds), 1e-6)
    assert quantized.ByteSize() < (0.4 if bits == 8 else 0.3) * model.ByteSize()


def test_onnxruntime_unpacks_stored_weights_when_it_loads_them(tmp_path: Any) -> None:
    """Otherwise it would at every run, which takes longer than the layer itself."""
    for bits in (4, 8):
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
        options.log_severity_level = 3
        quantized = applied(case_of("GRU", {}).model(), SCHEMES[f"int{bits}-weights"], FLOAT32)
        onnxruntime.InferenceSession(quantized.SerializeToString(), options)
        assert operators_of(onnx.load(tmp_path / "loaded.onnx")) == {"GRU": 1}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("kind", "attributes"), KINDS)
def test_inputs_from_a_small_table_are_multiplied_before_it_is_written(kind: str, attributes: dict[str, Any]) -> None:
    case = case_of(kind, attributes, "bidirectional", table=40, lengths=True)
    model = case.model()
    quantized = applied(model, SCHEMES["int8-weights"], INT8)
    counts = operators_of(quantized)
    assert (counts["Gather"], counts["com.microsoft::GatherBlockQuantized"]) == (1, 1)  # the former: of a shape
    products = 4 if (kind, attributes) == ("GRU", {}) else 2
    assert counts["com.microsoft::MatMulNBits"] == products  # of the states alone
    feeds = case.feeds(3, 6)
    for name, reference in answers(model, feeds).items():
        assert np.linalg.norm(answers(quantized, feeds)[name] - reference) < 0.03 * np.linalg.norm(reference)
    larger = applied(case_of(kind, attributes, "bidirectional", table=100).model(), SCHEMES["int8-weights"], INT8)
    assert operators_of(larger)["com.microsoft::MatMulNBits"] == products + 1


# Rounded activations.

FORMS = {  # and what multiplies by rows: the inputs, the states
    "int8-weights": (SCHEMES["int8-weights"], {}, (False, False)),
    "of texts": (SCHEMES["int8-weights"], {"many_rows": True}, (True, False)),
    "of many texts": (SCHEMES["int8-weights"], {"many_rows": True, "large_batch": True}, (True, True)),
    "int8-dynamic on tokens": (by_row.ON_TOKENS, {}, (True, False)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "attributes"), KINDS)
def test_with_rounded_activations_answers_stay_near_and_do_not_depend_on_neighbours_or_on_the_cut(
    kind: str, attributes: dict[str, Any], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporters.quantizers.recurrent.FEWEST_IN_STEPS", 0)
    case = case_of(kind, attributes)
    model = case.model()
    scheme, request, by_rows = FORMS[form]
    quantized = applied(model, scheme, **request)
    counts = operators_of(quantized)
    products = (1, 2 if (kind, attributes) == ("GRU", {}) else 1)
    assert counts["Scan"] == 1
    assert counts["com.microsoft::MatMulIntegerToFloat"] == np.dot(by_rows, products)
    assert counts["com.microsoft::MatMulNBits"] == sum(products) - np.dot(by_rows, products)
    feeds = case.feeds(4, 6)
    feeds["x"] *= np.array([1e-3, 0.1, 1, 2], np.float32)[:, None]
    together = answers(quantized, feeds)
    plain = answers(model, feeds)["y"]
    assert np.linalg.norm(together["y"] - plain) < 0.05 * np.linalg.norm(plain)
    for row in range(4):
        alone = answers(quantized, {name: array[:, row : row + 1] for name, array in feeds.items()})
        np.testing.assert_allclose(alone["y"][:, :, 0], together["y"][:, :, row], atol=1e-6)
    first = answers(quantized, feeds | {"x": feeds["x"][:4]})
    rest = answers(quantized, {"x": feeds["x"][4:]} | {f"{name}0": first[f"{name}n"] for name in case.states})
    np.testing.assert_allclose(np.concatenate([first["y"], rest["y"]]), together["y"], atol=1e-6)


@pytest.mark.parametrize("kind", OPERATORS)
def test_int8_dynamic_takes_all_three_of_networks_on_numbers(kind: str) -> None:
    case = Case(kind, "bidirectional", width=64, hidden=256 if kind != "RNN" else 448)
    model = case.model()
    quantized = applied(model, SCHEMES["int8-dynamic"])
    counts = operators_of(quantized)
    assert counts["com.microsoft::DynamicQuantizeLSTM" if kind == "LSTM" else "Scan"] == 1
    assert quantized.ByteSize() < 0.3 * model.ByteSize()
    feeds = {name: 0.5 * array for name, array in case.feeds(2, 5).items()}
    reference = answers(model, feeds)["y"]
    assert np.linalg.norm(answers(quantized, feeds)["y"] - reference) < 0.1 * np.linalg.norm(reference)


# What is decided, and why.


def reason_of(case: Case, scheme: str = "int8-weights", recurrence: str = AUTO) -> NodeDecision:
    return next(
        item for item in decisions(case.model(), SCHEMES[scheme], WeightSettings(recurrence=recurrence)) if item.node == "layer"
    )


def test_a_decision_says_in_what_a_layer_computes_and_why() -> None:
    small, large = Case("GRU"), Case("GRU", hidden=256)
    assert reason_of(small).reason == (
        "stored in blocks, computed in float32: with 6912 weights of the state its own operator is faster"
    )
    assert reason_of(large).reason == (
        "quantized step by step: with 196608 weights of the state that is no slower than its own operator"
    )
    assert reason_of(small, recurrence=INT8).reason == "quantized step by step: recurrence=int8 was asked for"
    assert all(item.quantized and item.scheme == "int8-weights" for item in (reason_of(small), reason_of(large)))


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"clip": 3.0}, "it has clip"),
        ({"input_forget": 1}, "it has input_forget"),
        ({"activations": ["Sigmoid", "Relu", "Tanh"]}, "it has the activations Sigmoid, Relu, Tanh"),
    ],
)
def test_what_only_the_operator_can_do_is_left_to_it_and_its_weights_are_stored(attributes: dict[str, Any], why: str) -> None:
    case = Case("LSTM", attributes=attributes)
    assert reason_of(case, recurrence=INT8).reason == f"stored in blocks, computed in float32: {why}"
    model, feeds = case.model(), case.feeds(2, 4)
    quantized = applied(model, SCHEMES["int8-weights"], INT8)
    assert_near(answers(quantized, feeds), answers(with_stored_weights(model, 8), feeds), 1e-6)


def test_peepholes_are_left_to_the_operator() -> None:
    model = Case("LSTM").model()
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 3 * 48), np.float32), "P"))
    model.graph.node[0].input.append("P")
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    assert arithmetic_of(model.graph.node[0], shapes) == (FLOAT32, "stored in blocks, computed in float32: it has peepholes")


def test_layers_that_cannot_be_taken_are_told() -> None:
    with pytest.raises(QuantizationRefused, match=r"layer \(RNN\): 288 weights are too few to save anything"):
        decisions(Case("RNN", width=12, hidden=12).model(), SCHEMES["int8-weights"])
    model = Case("GRU").model()
    model.graph.node[0].input[2] = "given"
    with pytest.raises(QuantizationRefused, match=r"layer \(GRU\): only weights that are constant have a quantized form"):
        decisions(model, SCHEMES["int4-weights"])


def test_an_unknown_way_to_compute_is_told() -> None:
    with pytest.raises(
        OptionError, match="setting 'recurrence' is 'fp16', expected int8 or float32, or auto to have it chosen"
    ):
        WeightSettings(recurrence="fp16")


def test_every_decision_of_every_scheme_has_a_reason() -> None:
    for scheme, kind in product(("int8-weights", "int4-weights", "int8-dynamic"), OPERATORS):
        assert reason_of(Case(kind), scheme).reason
