"""fp16 and bf16, and several schemes in one graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, numpy_helper

from exporters.export import export
from exporters.likelihood import quality_of_text
from exporters.quantize import Budget, quantize
from exporters.quantized_graphs import Part, convert_parts
from exporters.quantizers.stored import bfloat16_bits, store
from exporters.source import find_source
from runtime.bundle import DECODER, Bundle
from runtime.errors import OptionError, QuantizationRefused
from runtime.session import Session

from ..helpers import make_model

SIZES = {"vocabulary": 40, "embedding": 32, "hidden": 64}


@pytest.fixture(scope="module")
def seq2seq(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    network = find_source("seq2seq-attention", {**SIZES, "target_vocabulary": 40})
    return export(network, tmp_path_factory.mktemp("s") / "s.bundle").bundle


def two_products(first: np.ndarray, second: np.ndarray) -> onnx.ModelProto:
    nodes = [onnx.helper.make_node("MatMul", ["x", "a"], ["h"], name="one")]
    nodes.append(onnx.helper.make_node("MatMul", ["h", "b"], ["y"], name="two"))
    shape = (TensorProto.FLOAT, ["batch", 32])
    return make_model(nodes, {"a": first, "b": second}, inputs={"x": shape}, outputs={"y": shape})


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_stored_weights_give_the_answers_of_rounded_ones(kind: str) -> None:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((32, 32)).astype(np.float32) for _ in range(2))
    stored = store(two_products(a, b), ("one",), kind)
    kinds = {tensor.name: tensor.data_type for tensor in stored.graph.initializer}
    assert kinds == {f"a.{kind}": TensorProto.FLOAT16 if kind == "fp16" else TensorProto.BFLOAT16, "b": TensorProto.FLOAT}
    rounded = torch.from_numpy(a).to(torch.float16 if kind == "fp16" else torch.bfloat16).float().numpy()
    assert not np.array_equal(rounded, a)
    x = random.standard_normal((5, 32)).astype(np.float32)
    answers = [
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for model in (stored, two_products(rounded, b))
    ]
    np.testing.assert_array_equal(*answers)


def test_bfloat16_rounds_as_pytorch_does() -> None:
    values = np.random.default_rng(1).standard_normal(4096).astype(np.float32) * 10.0 ** np.arange(-20, 12).repeat(128)
    values = np.concatenate([values, [0.0, -0.0, 1.00390625, 1.01171875]]).astype(np.float32)  # the last two are ties
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bfloat16_bits(values), expected)


def test_a_weight_too_large_for_half_precision_stays() -> None:
    large = np.full((32, 32), 1e5, np.float32)
    stored = store(two_products(large, large), ("one", "two"), "fp16")
    assert [tensor.data_type for tensor in stored.graph.initializer] == [TensorProto.FLOAT, TensorProto.FLOAT]
    assert np.isfinite(numpy_helper.to_array(stored.graph.initializer[0])).all()


def test_a_conversion_that_crashes_onnxruntime_is_refused_and_does_not_crash_us(seq2seq: Bundle, tmp_path: Path) -> None:
    """onnxruntime (1.23 to 1.31) dies of the half-precision GRU in this encoder while it loads it."""
    with pytest.raises(QuantizationRefused, match="fp16 gives a graph that onnxruntime cannot run: .*encoder"):
        quantize(seq2seq, tmp_path / "q.bundle", scheme="fp16", quality=quality_of_text(seq2seq), threads=1)
    assert not (tmp_path / "q.bundle").exists()


def test_an_arithmetic_that_does_not_exist_is_refused(seq2seq: Bundle, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="arithmetic is 'quarter', expected one of: half, float32"):
        quantize(
            seq2seq,
            tmp_path / "q.bundle",
            scheme="fp16",
            settings={"arithmetic": "quarter"},
            quality=quality_of_text(seq2seq),
            threads=1,
        )


def test_the_report_names_the_settings_that_were_changed(seq2seq: Bundle, tmp_path: Path) -> None:
    report = quantize(
        seq2seq,
        tmp_path / "q.bundle",
        scheme="fp16",
        settings={"arithmetic": "float32"},
        quality=quality_of_text(seq2seq),
        budget=Budget(for_size=True),
        threads=1,
    )
    assert report.label == "fp16 (arithmetic=float32)"
    assert report.size_ratio < 0.6


def test_several_schemes_share_a_graph(seq2seq: Bundle) -> None:
    """Each node goes to the first part that takes it, and a report says which nodes were left."""
    everything = convert_parts(seq2seq, (Part("int8-dynamic"),))
    products = [node.node for node in everything.nodes if node.quantized and node.operator in ("MatMul", "Gemm")]
    first, *rest = products
    mixed = convert_parts(seq2seq, (Part("int8-dynamic", nodes=frozenset([first])), Part("bf16", nodes=frozenset(rest))))
    assert {node.node for node in mixed.nodes if node.quantized} == {first, *rest}
    operators = [node.op_type for model in mixed.models.values() for node in model.graph.node]
    assert operators.count("MatMulIntegerToFloat") == 1
    assert [node.reason for node in mixed.nodes if not node.quantized]


def test_dynamic_int8_of_a_row_does_not_depend_on_its_neighbours(seq2seq: Bundle) -> None:
    decoder = convert_parts(seq2seq, (Part("int8-dynamic"),)).models[DECODER]
    signature = seq2seq.manifest.graphs[DECODER].signature
    session = Session(decoder.SerializeToString(), signature, device="cpu", threads=1)
    _, feeds, _ = next(golden for golden in seq2seq.goldens() if golden[0].graph == DECODER)
    together = session.run(feeds)["logits"]
    axes = {spec.name: spec.shape.index("batch") for spec in signature.inputs if "batch" in spec.shape}
    for row in range(len(together)):
        alone = {name: np.take(array, [row], axis=axes[name]) if name in axes else array for name, array in feeds.items()}
        np.testing.assert_array_equal(session.run(alone)["logits"][0], together[row])
