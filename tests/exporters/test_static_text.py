"""int8-static on networks on text: the laws of decoding, what is stored, and what onnxruntime makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from architectures.settings import apply_settings
from exporters.export import export
from exporters.exportable import Exportable
from exporters.graph import operators_of, read_model
from exporters.laws import check_laws, texts_for
from exporters.likelihood import quality_of_text
from exporters.quantize import Budget, QuantizeReport, quantize
from exporters.quantized_graphs import Part, convert_parts
from exporters.quantizers import SCHEMES
from exporters.quantizers.scheme import Request, quantizable
from exporters.quantizers.static_text import ON_TOKENS
from exporters.race import Speed
from exporters.rollouts import calibration_of_text
from exporters.source import find_source
from runtime.bundle import DECODER, ENCODER, Bundle
from runtime.session import Session
from runtime.state import initial_state, step
from runtime.statistics import Estimate
from runtime.verify import verify_bundle

from ..helpers import make_model

SIZES: dict[str, Any] = {"vocabulary": 200, "width": 64, "heads": 2, "feedforward": 256}
NETWORKS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "gpt": ("gpt", "portable", SIZES | {"layers": 2}),
    "gpt in place": ("gpt", "onnxruntime", SIZES | {"layers": 2}),
    "transformer": (
        "transformer",
        "onnxruntime",
        SIZES
        | {"target_vocabulary": 200, "encoder_layers": 1, "decoder_layers": 1, "shared_embeddings": True, "tied_output": True},
    ),
    "seq2seq-attention": (
        "seq2seq-attention",
        None,
        {"vocabulary": 90, "target_vocabulary": 90, "embedding": 64, "hidden": 64},
    ),
    "gru": ("gru", None, {"vocabulary": 90, "embedding": 64, "hidden": 64}),
}
Make = Callable[[str], tuple[Exportable, Bundle]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, tuple[Exportable, Bundle]] = {}

    def make(label: str) -> tuple[Exportable, Bundle]:
        if label not in made:
            name, profile, settings = NETWORKS[label]
            network = find_source(name, settings, profile=profile)
            made[label] = network, export(network, tmp_path_factory.mktemp("text") / "x.bundle").bundle
        return made[label]

    return make


@pytest.fixture(autouse=True)
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    even = Speed(Estimate(1.0, 0.99, 1.01), Estimate(1.0, 0.99, 1.01), 100.0, 100.0, 1, 1, 1)
    monkeypatch.setattr("exporters.quantize.measure_speed", lambda *_: even)
    monkeypatch.setattr("exporters.quantize._refuse_unrunnable", lambda *_: None)  # a process for each takes long


def quantized(bundle: Bundle, target: Path, **settings: str) -> tuple[QuantizeReport, Bundle]:
    report = quantize(
        bundle,
        target,
        scheme="int8-static",
        settings=settings,
        quality=quality_of_text(bundle),
        calibration=calibration_of_text(bundle),
        budget=Budget(max_drop=5.0),
        threads=1,
    )
    return report, Bundle.open(target)


def sessions_of(bundle: Bundle) -> dict[str, Session]:
    return {
        name: Session(bundle.graph_path(name), graph.signature, device="cpu", threads=1)
        for name, graph in bundle.manifest.graphs.items()
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_a_quantized_network_obeys_the_laws_of_decoding_within_its_tolerance(name: str, exported: Make, tmp_path: Path) -> None:
    network, bundle = exported(name)
    report, small = quantized(bundle, tmp_path / "q.bundle")
    assert report.size_ratio < (0.45 if name not in ("seq2seq-attention", "gru") else 0.9)  # recurrent weights stay
    assert report.metric_after > 98
    assert verify_bundle(small.root)
    assert network.generator is not None
    allowed = small.manifest.tolerance[DECODER]["logits"].allowed
    texts = texts_for(network.generator, {graph: entry.signature for graph, entry in small.manifest.graphs.items()})
    laws = check_laws(network.generator, sessions_of(small), texts, allowed=2 * allowed)
    assert all(laws), [law.problem for law in laws]
    assert sum(law.skipped is None for law in laws) >= 4


@pytest.mark.parametrize("name", ["gpt", "gpt in place"])
def test_a_row_alone_answers_as_it_does_in_a_batch(name: str, exported: Make, tmp_path: Path) -> None:
    _, small = quantized(exported(name)[1], tmp_path / "q.bundle")
    session = sessions_of(small)[DECODER]
    tokens = np.random.default_rng(0).integers(4, 200, (3, 6))
    together, _ = step(session, tokens, initial_state(session.signature, 3, capacity=8))
    for row in range(3):
        alone, _ = step(session, tokens[row : row + 1], initial_state(session.signature, 1, capacity=8))
        np.testing.assert_allclose(alone[0], together[row], atol=2e-5)


def test_every_product_and_embedding_is_in_int8_and_nothing_else_is(exported: Make) -> None:
    _, bundle = exported("transformer")
    converted = convert_parts(bundle, (Part("int8-static"),), calibration_of_text(bundle))
    assert all(node.quantized for node in converted.nodes)
    for name, model in converted.models.items():
        before = operators_of(read_model(bundle.graph_path(name)))
        after = operators_of(model)
        assert after["com.microsoft::MultiHeadAttention"] == before["com.microsoft::MultiHeadAttention"]
        assert after["com.microsoft::GroupQueryAttention"] == before["com.microsoft::GroupQueryAttention"]
        makers = {output: node.op_type for node in model.graph.node for output in node.output}
        weights = {tensor.name for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "MatMul" and (node.input[1] in weights or makers[node.input[1]] == "DequantizeLinear"):
                assert [makers[name] for name in node.input] == ["DequantizeLinear"] * 2
        large = [tensor for tensor in model.graph.initializer if np.prod(tensor.dims) >= 4096]
        assert {tensor.data_type for tensor in large} == {TensorProto.INT8}


def as_loaded(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """What onnxruntime makes of it."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path)
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(path)


def test_onnxruntime_makes_integer_products_of_it(exported: Make, tmp_path: Path) -> None:
    _, bundle = exported("gpt")
    model = convert_parts(bundle, (Part("int8-static"),), calibration_of_text(bundle)).models[DECODER]
    products = sum(node.op_type == "MatMul" and "multiplied" in node.input[1] for node in model.graph.node)
    operators = operators_of(as_loaded(model, tmp_path / "optimized.onnx"))
    assert products == 13  # six of each layer, and the output layer
    assert operators["com.microsoft::MatMulIntegerToFloat"] == products


@pytest.mark.parametrize("name", NETWORKS)
def test_no_weight_is_converted_back_at_every_call(name: str, exported: Make, tmp_path: Path) -> None:
    _, bundle = exported(name)
    for graph, model in convert_parts(bundle, (Part("int8-static"),), calibration_of_text(bundle)).models.items():
        loaded = as_loaded(model, tmp_path / f"{graph}.onnx").graph
        large = {tensor.name for tensor in loaded.initializer if np.prod(tensor.dims) >= 1000}
        assert not [node.name for node in loaded.node if node.op_type == "DequantizeLinear" and node.input[0] in large]


def test_a_table_that_is_also_the_output_layer_of_several_graphs_is_stored_once(exported: Make, tmp_path: Path) -> None:
    for number, settings in enumerate(({}, {"per_channel": "no"}, {"reduce_range": "auto"}, {"reduce_range": "never"})):
        _, small = quantized(exported("transformer")[1], tmp_path / f"{number}.bundle", **settings)
        table, positions = 200 * 64, 512 * 64
        shared = (small.root / "weights.data").stat().st_size
        assert table + positions <= shared < 1.5 * (table + positions), settings
        for graph in small.manifest.graphs:
            names = {
                entry.value
                for tensor in onnx.load(small.graph_path(graph), load_external_data=False).graph.initializer
                if list(tensor.dims) == [200, 64]
                for entry in tensor.external_data
                if entry.key == "location"
            }
            assert names == {"weights.data"}, graph


@pytest.mark.parametrize(("reduce_range", "largest"), [("always", 64), ("auto", 64), ("never", 127)])
def test_a_tied_table_is_multiplied_by_in_seven_bits_unless_eight_are_asked_for(
    reduce_range: str, largest: int, exported: Make
) -> None:
    _, bundle = exported("transformer")
    part = Part("int8-static", apply_settings(ON_TOKENS.settings, {"reduce_range": reduce_range}))
    for model in convert_parts(bundle, (part,), calibration_of_text(bundle)).models.values():
        tables = [numpy_helper.to_array(tensor) for tensor in model.graph.initializer if list(tensor.dims) == [200, 64]]
        assert {int(np.abs(table.astype(int)).max()) for table in tables} == {largest}


def test_signed_activations_are_the_unsigned_ones_shifted() -> None:
    zeros = {}
    for types in ("u8s8", "s8s8"):
        settings = apply_settings(ON_TOKENS.settings, {"types": types})
        model = quantizable(convolution_on_tokens())
        stored = ON_TOKENS.apply(Request(model, ("kernel", "gemm"), (), True, tokens, settings)).graph.initializer
        zeros[types] = {
            tensor.name: int(numpy_helper.to_array(tensor)) for tensor in stored if tensor.name in ("t.zero", "m.zero")
        }
    assert zeros["s8s8"] == {name: zero - 128 for name, zero in zeros["u8s8"].items()}
    assert set(zeros["u8s8"]) == {"t.zero", "m.zero"}


def test_the_same_samples_give_the_same_bytes(exported: Make) -> None:
    _, bundle = exported("gpt")
    settings = apply_settings(ON_TOKENS.settings, {"ranges": "entropy", "reduce_range": "auto"})
    once, again = (
        convert_parts(bundle, (Part("int8-static", settings),), calibration_of_text(bundle)).models[DECODER] for _ in range(2)
    )
    assert once.SerializeToString() == again.SerializeToString()


def test_what_activations_are_like_is_gathered_once_for_many_conversions(exported: Make) -> None:
    _, bundle = exported("gpt")
    calls: list[str] = []
    real = calibration_of_text(bundle)

    def calibration(graph: str) -> Any:
        calls.append(graph)
        return real(graph)

    for ranges in ("percentile", "mse", "entropy"):
        convert_parts(bundle, (Part("int8-static", apply_settings(ON_TOKENS.settings, {"ranges": ranges})),), calibration)
    first = len(calls)
    convert_parts(bundle, (Part("int8-static"),), calibration)
    assert len(calls) == first == 4  # two passes, each after a look at the first batch


# Single operators.


def convolution_on_tokens() -> onnx.ModelProto:
    """An embedding, a convolution over time with a bias, and a Gemm that transposes, scales and adds."""
    random = np.random.default_rng(0)
    weights = {
        "E": random.standard_normal((100, 48)),
        "K": random.standard_normal((32, 48, 3)) / 12,
        "c": random.standard_normal(32),
        "G": random.standard_normal((40, 32)) / 6,
        "b": random.standard_normal(40),
    }
    nodes = [
        helper.make_node("Gather", ["E", "tokens"], ["e"], name="table"),
        helper.make_node("Transpose", ["e"], ["t"], perm=[0, 2, 1]),
        helper.make_node("Conv", ["t", "K", "c"], ["k"], name="kernel", pads=[1, 1], kernel_shape=[3]),
        helper.make_node("ReduceMax", ["k"], ["m"], axes=[2], keepdims=0),
        helper.make_node("Gemm", ["m", "G", "b"], ["y"], name="gemm", transB=1, alpha=0.5),
    ]
    return make_model(
        nodes,
        {name: array.astype(np.float32) for name, array in weights.items()},
        inputs={"tokens": (TensorProto.INT64, ["batch", "time"])},
        outputs={"y": (TensorProto.FLOAT, ["batch", 40])},
        opset=13,
    )


def tokens() -> Iterator[dict[str, Any]]:
    return iter([{"tokens": np.random.default_rng(1).integers(0, 100, (64, 9))}])


def answer(model: onnx.ModelProto) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, next(tokens()))[0]


@pytest.mark.parametrize("types", ["u8s8", "s8s8"])
@pytest.mark.parametrize("per_channel", ["yes", "no"])
@pytest.mark.parametrize("reduce_range", ["always", "auto", "never"])
def test_convolutions_gemms_and_tables_stay_near_the_original(types: str, per_channel: str, reduce_range: str) -> None:
    model = quantizable(convolution_on_tokens())
    settings = apply_settings(ON_TOKENS.settings, {"types": types, "per_channel": per_channel, "reduce_range": reduce_range})
    request = Request(model, ("table", "kernel", "gemm"), (), False, tokens, settings)
    small = ON_TOKENS.apply(request)
    onnx.checker.check_model(small)
    kinds = Counter(tensor.data_type for tensor in small.graph.initializer if np.prod(tensor.dims) > 1000)
    assert kinds == {TensorProto.INT8: 3}
    expected, found = answer(model), answer(small)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.03
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in small.graph.initializer}
    scales = [array.size for name, array in stored.items() if name.startswith("G.") and name.endswith(".scale")]
    assert scales == [40 if per_channel == "yes" else 1]
    activation = next(node for node in small.graph.node if node.op_type == "QuantizeLinear")
    assert stored[activation.input[2]].dtype == (np.uint8 if types == "u8s8" else np.int8)


@pytest.mark.parametrize("types", ["u8s8", "s8s8"])
@pytest.mark.parametrize("per_channel", ["yes", "no"])
def test_a_flat_product_with_its_bias_is_one_integer_product_when_loaded(types: str, per_channel: str, tmp_path: Path) -> None:
    model = quantizable(convolution_on_tokens())
    settings = apply_settings(ON_TOKENS.settings, {"types": types, "per_channel": per_channel})
    small = ON_TOKENS.apply(Request(model, ("gemm",), (), True, tokens, settings))
    onnx.checker.check_model(small)
    assert operators_of(as_loaded(small, tmp_path / "loaded.onnx"))["com.microsoft::QGemm"] == 1
    error = np.linalg.norm(answer(small) - answer(model)) / np.linalg.norm(answer(model))
    assert 0 < error < 0.02


def with_tiny(weight: str) -> onnx.ModelProto:
    model = quantizable(convolution_on_tokens())
    stored = next(tensor for tensor in model.graph.initializer if tensor.name == weight)
    stored.CopyFrom(numpy_helper.from_array(1e-12 * numpy_helper.to_array(stored), weight))
    return model


def test_a_bias_that_32_bits_cannot_hold_stays_as_it_is() -> None:
    model = with_tiny("G")
    small = ON_TOKENS.apply(Request(model, ("gemm",), (), True, tokens, ON_TOKENS.settings))
    assert "b" in {tensor.name for tensor in small.graph.initializer}
    np.testing.assert_allclose(answer(small), answer(model), rtol=1e-5)


@pytest.mark.parametrize("per_channel", ["yes", "no"])
def test_a_convolution_with_weights_tiny_beside_its_bias_keeps_the_bias(per_channel: str) -> None:
    model = with_tiny("K")
    settings = apply_settings(ON_TOKENS.settings, {"per_channel": per_channel})
    small = ON_TOKENS.apply(Request(model, ("kernel",), (), True, tokens, settings))
    assert np.linalg.norm(answer(small) - answer(model)) < 0.01 * np.linalg.norm(answer(model))


def test_an_eight_bit_weight_is_nearer_than_a_seven_bit_one() -> None:
    model = quantizable(convolution_on_tokens())

    def error(reduce_range: str) -> float:
        settings = apply_settings(ON_TOKENS.settings, {"reduce_range": reduce_range})
        small = ON_TOKENS.apply(Request(model, ("gemm",), (), True, tokens, settings))
        return float(np.linalg.norm(answer(small) - answer(model)))

    assert error("never") < 0.9 * error("always")


def test_two_products_of_one_tied_table_turn_it_once() -> None:
    table = np.random.default_rng(0).standard_normal((100, 64)).astype(np.float32)
    nodes = [helper.make_node("Gather", ["E", "tokens"], ["e"], name="table"), helper.make_node("Tanh", ["e"], ["h"])]
    nodes += [helper.make_node("Transpose", ["E"], ["T"], perm=[1, 0])]
    nodes += [helper.make_node("MatMul", [name, "T"], [f"{name}.y"], name=f"head.{name}") for name in ("e", "h")]
    shape = (TensorProto.FLOAT, ["batch", "time", 100])
    inputs = {"tokens": (TensorProto.INT64, ["batch", "time"])}
    model = ON_TOKENS.prepare(quantizable(make_model(nodes, {"E": table}, inputs=inputs, outputs={"e.y": shape, "h.y": shape})))
    from exporters.quantizers.weights import tied_tables

    request = Request(model, ("table", "head.e", "head.h"), (), False, tokens, ON_TOKENS.settings, tied=tied_tables([model]))
    small = ON_TOKENS.apply(request)
    onnx.checker.check_model(small)
    assert operators_of(small)["Transpose"] == 1
    error = np.linalg.norm(answer(small) - answer(model)) / np.linalg.norm(answer(model))
    assert error < 0.03


def test_networks_on_tokens_have_a_form_of_their_own_with_the_same_settings(exported: Make) -> None:
    from exporters.quantizers import scheme_for

    assert scheme_for("int8-static", exported("gpt")[1].manifest) is ON_TOKENS
    assert ON_TOKENS.settings == SCHEMES["int8-static"].settings
    assert ENCODER in exported("transformer")[1].manifest.graphs
