"""Forms of products that third-party graphs have: each is quantized right, or left alone with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from architectures.settings import apply_settings
from exporters.adopt import adopt
from exporters.quantized_graphs import Part, convert_parts
from exporters.quantizers import SCHEMES, scheme_for
from exporters.quantizers.scheme import quantizable
from runtime.bundle import Bundle
from runtime.errors import QuantizationRefused

from ..helpers import make_model, save

WIDTH, OUTPUTS, ROWS = 48, 40, 64
Array = np.ndarray[Any, Any]
random = np.random.default_rng(0)


def weights(*shape: int) -> Array:
    return (random.standard_normal(shape) / 4).astype(np.float32)


def samples(*shape: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}


def answers(model: onnx.ModelProto, feeds: dict[str, Array]) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    (found,) = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)
    return np.asarray(found)


def error(model: onnx.ModelProto, reference: onnx.ModelProto, feeds: dict[str, Array]) -> float:
    expected = answers(reference, feeds)
    return float(np.linalg.norm(answers(model, feeds) - expected) / np.linalg.norm(expected))


def with_gemm(bias: tuple[int, ...], **attributes: Any) -> onnx.ModelProto:
    """A Gemm of the given form, and a plain product, so that there is always something to quantize."""
    turned = (OUTPUTS, WIDTH) if attributes.get("transB") else (WIDTH, OUTPUTS)
    nodes = [
        helper.make_node("Gemm", ["x", "W", "b"], ["h"], name="gemm", **attributes),
        helper.make_node("MatMul", ["h", "V"], ["y"], name="plain"),
    ]
    known = {"W": weights(*turned), "b": 2 * weights(*bias) + 1, "V": weights(OUTPUTS, OUTPUTS)}
    first = (TensorProto.FLOAT, [WIDTH, "batch"] if attributes.get("transA") else ["batch", WIDTH])
    return make_model(nodes, known, inputs={"x": first}, outputs={"y": (TensorProto.FLOAT, ["batch", OUTPUTS])})


def converted(model: onnx.ModelProto, folder: Path, part: Part, feeds: dict[str, Array]) -> tuple[onnx.ModelProto, set[str]]:
    """What the part makes of it, and the names of the nodes that it says are quantized."""
    folder.mkdir(exist_ok=True)
    bundle = adopt(save(model, folder / "net.onnx"), folder / "net.bundle").bundle
    made = convert_parts(bundle, (part,), lambda graph: iter([feeds]))
    return made.models["model"], {node.node for node in made.nodes if node.quantized}


FORMS = [
    ((OUTPUTS,), {}, {"gemm"}),
    ((OUTPUTS,), {"transB": 1}, {"gemm"}),
    ((1, OUTPUTS), {}, {"gemm"}),
    ((1,), {}, {"gemm"}),
    ((), {"transB": 1}, {"gemm"}),
    ((OUTPUTS,), {"alpha": 0.5}, {"gemm"}),
    ((OUTPUTS,), {"beta": 0.5}, set()),
    ((OUTPUTS,), {"beta": 0.0}, set()),
    ((OUTPUTS,), {"transA": 1}, set()),
]


@pytest.mark.parametrize("per_channel", ["true", "false"])
@pytest.mark.parametrize("reduce_range", ["always", "auto", "never"])
@pytest.mark.parametrize(("bias", "attributes", "taken"), FORMS)
def test_int8_static_is_right_on_every_form_of_a_gemm_or_leaves_it(
    bias: tuple[int, ...],
    attributes: dict[str, Any],
    taken: set[str],
    reduce_range: str,
    per_channel: str,
    tmp_path: Path,
) -> None:
    settings = apply_settings(SCHEMES["int8-static"].settings, {"reduce_range": reduce_range, "per_channel": per_channel})
    feeds = samples(*((WIDTH, ROWS) if "transA" in attributes else (ROWS, WIDTH)))
    model = with_gemm(bias, **attributes)
    made, names = converted(model, tmp_path, Part("int8-static", settings), feeds)
    assert names == taken | {"plain"}
    assert error(made, model, feeds) < 0.05


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-weights", "int4-weights"])
@pytest.mark.parametrize(("bias", "attributes", "taken"), FORMS)
def test_what_is_called_quantized_is_so(
    bias: tuple[int, ...], attributes: dict[str, Any], taken: set[str], scheme: str, tmp_path: Path
) -> None:
    feeds = samples(*((WIDTH, ROWS) if "transA" in attributes else (ROWS, WIDTH)))
    model = with_gemm(bias, **attributes)
    made, names = converted(model, tmp_path, Part(scheme), feeds)
    is_left = "alpha" in attributes and scheme == "int8-dynamic"
    assert names == (set() if is_left else taken) | {"plain"}
    assert sum(node.op_type in ("Gemm", "MatMul") for node in made.graph.node) == 2 - len(names)
    assert error(made, model, feeds) < (0.2 if scheme == "int4-weights" else 0.05)


@pytest.mark.parametrize("scheme", ["int8-static", "int8-dynamic", "int8-weights"])
def test_a_product_by_many_matrices_is_left_alone_and_the_others_are_not(scheme: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "C"], ["c"], name="convolution", pads=[1, 1, 1, 1]),
        helper.make_node("MatMul", ["c", "M"], ["m"], name="many"),
        helper.make_node("MatMul", ["m", "V"], ["y"], name="plain"),
    ]
    known = {"C": weights(4, 4, 3, 3), "M": weights(4, WIDTH, WIDTH), "V": weights(WIDTH, OUTPUTS)}
    shape = (TensorProto.FLOAT, ["batch", 4, 8, WIDTH])
    model = make_model(nodes, known, inputs={"x": shape}, outputs={"y": (TensorProto.FLOAT, ["batch", 4, 8, OUTPUTS])})
    feeds = samples(4, 4, 8, WIDTH)
    made, names = converted(model, tmp_path, Part(scheme), feeds)
    assert "plain" in names
    assert "many" not in names
    assert error(made, model, feeds) < 0.05


@pytest.mark.parametrize("opset", [10, 11, 12])
def test_a_graph_of_an_old_opset_takes_one_scale_a_tensor(opset: int, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "C"], ["c"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["c", "D"], ["y"], name="second", pads=[1, 1, 1, 1]),
    ]
    known = {"C": weights(8, 8, 3, 3), "D": weights(8, 8, 3, 3)}
    shape = (TensorProto.FLOAT, ["batch", 8, 8, 8])
    model = make_model(nodes, known, inputs={"x": shape}, outputs={"y": shape}, opset=opset)
    feeds = samples(4, 8, 8, 8)
    made, names = converted(model, tmp_path, Part("int8-static"), feeds)
    assert names == {"first", "second"}
    assert error(made, model, feeds) < 0.05
    bundle = Bundle.open(tmp_path / "net.bundle")
    wanted = apply_settings(scheme_for("int8-static", bundle.manifest).settings, {"per_channel": "true"})
    with pytest.raises(
        QuantizationRefused, match=f"needs opset 13 or later, and this graph has {opset}; leave per_channel out"
    ):
        convert_parts(bundle, (Part("int8-static", wanted),), lambda graph: iter([feeds]))
    with pytest.raises(QuantizationRefused, match=f"bf16 needs opset 13 or later, and this graph has {opset}"):
        convert_parts(bundle, (Part("bf16"),))


def test_a_weight_that_a_gemm_transposes_may_have_other_readers(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "W"], ["h"], name="first", transB=1),
        helper.make_node("Gemm", ["h", "W"], ["i"], name="second", transB=1),
        helper.make_node("MatMul", ["i", "V"], ["y"], name="plain"),
    ]
    shape = (TensorProto.FLOAT, ["batch", 64])
    model = make_model(nodes, {"W": weights(64, 64), "V": weights(64, 64)}, inputs={"x": shape}, outputs={"y": shape})
    feeds = samples(ROWS, 64)
    for scheme in ("int8-dynamic", "int8-static"):
        made, names = converted(model, tmp_path / scheme, Part(scheme), feeds)
        assert names == {"first", "second", "plain"}
        assert error(made, model, feeds) < 0.05


def test_a_transposed_convolution_with_the_kernel_of_a_convolution_is_right(tmp_path: Path) -> None:
    kernel = weights(8, 8, 3, 3) * np.linspace(0.05, 2, 8, dtype=np.float32)[:, None, None, None]
    nodes = [
        helper.make_node("Conv", ["x", "C"], ["c"], name="there", pads=[1, 1, 1, 1]),
        helper.make_node("ConvTranspose", ["c", "C"], ["y"], name="back", pads=[1, 1, 1, 1]),
    ]
    shape = (TensorProto.FLOAT, ["batch", 8, 8, 8])
    model = make_model(nodes, {"C": kernel}, inputs={"x": shape}, outputs={"y": shape})
    feeds = samples(16, 8, 8, 8)
    made, names = converted(model, tmp_path, Part("int8-static"), feeds)
    assert names == {"there"}
    assert error(made, model, feeds) < 0.05


def test_two_schemes_may_quantize_the_same_rows(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["E", "tokens"], ["x"], name="embedding"),
        helper.make_node("MatMul", ["x", "Q"], ["q"], name="q"),
        helper.make_node("MatMul", ["x", "K"], ["k"], name="k"),
        helper.make_node("Add", ["q", "k"], ["y"]),
    ]
    known = {"E": weights(200, 64), "Q": weights(64, 64), "K": weights(64, 64)}
    inputs = {"tokens": (TensorProto.INT64, ["batch", "time"])}
    outputs = {"y": (TensorProto.FLOAT, ["batch", "time", 64])}
    model = make_model(nodes, known, inputs=inputs, outputs=outputs)
    bundle = adopt(save(model, tmp_path / "net.onnx"), tmp_path / "net.bundle").bundle
    feeds = {"tokens": random.integers(0, 200, (4, 7))}
    for first, second in (("q", "k"), ("k", "q")):  # the later of the two schemes may have the earlier node
        parts = Part("int8-weights", nodes=frozenset([first])), Part("int8-dynamic", nodes=frozenset([second]))
        made = convert_parts(bundle, parts)
        assert {node.scheme for node in made.nodes if node.quantized} == {"int8-weights", "int8-dynamic"}
        assert error(made.models["model"], model, feeds) < 0.05


def test_a_matrix_may_be_an_output_layer_of_eight_bits_and_an_inner_product_of_four(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["h"], name="inner"),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("MatMul", ["t", "A"], ["y"], name="head"),
    ]
    shape = (TensorProto.FLOAT, ["batch", 64])
    model = make_model(nodes, {"A": weights(64, 64)}, inputs={"x": shape}, outputs={"y": shape})
    settings = apply_settings(SCHEMES["int4-weights"].settings, {"head": "8"})
    feeds = samples(ROWS, 64)
    made, names = converted(model, tmp_path, Part("int4-weights", settings), feeds)
    assert names == {"inner", "head"}
    assert error(made, model, feeds) < 0.2


def test_a_table_that_stays_in_float_is_not_stored_twice(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["E", "tokens"], ["x"], name="embedding"),
        helper.make_node("MatMul", ["x", "Q"], ["q"], name="q"),
        helper.make_node("Transpose", ["E"], ["T"], perm=[1, 0]),
        helper.make_node("MatMul", ["q", "T"], ["y"], name="head"),
    ]
    known = {"E": weights(200, 64), "Q": weights(64, 64)}
    inputs = {"tokens": (TensorProto.INT64, ["batch", "time"])}
    outputs = {"y": (TensorProto.FLOAT, ["batch", "time", 200])}
    model = make_model(nodes, known, inputs=inputs, outputs=outputs)
    bundle = adopt(save(model, tmp_path / "net.onnx"), tmp_path / "net.bundle").bundle
    feeds = {"tokens": random.integers(0, 200, (4, 7))}
    table = known["E"].nbytes
    for scheme in ("int8-weights", "int4-weights", "int8-static", "fp16"):
        for names, size in ((["q"], table), (["q", "embedding"], 1.6 * table), (["q", "embedding", "head"], 0.8 * table)):
            made = convert_parts(bundle, (Part(scheme, nodes=frozenset(names)),), lambda graph: iter([feeds])).models["model"]
            assert made.ByteSize() < size + known["Q"].nbytes + 4000, (scheme, names)
            assert error(made, model, feeds) < 0.2


def test_every_node_has_a_name_of_its_own() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["h"], name="MatMul_1"),
        helper.make_node("MatMul", ["h", "A"], ["i"]),
        helper.make_node("MatMul", ["i", "A"], ["y"], name="MatMul_1"),
    ]
    shape = (TensorProto.FLOAT, ["batch", 64])
    named = quantizable(make_model(nodes, {"A": weights(64, 64)}, inputs={"x": shape}, outputs={"y": shape}))
    assert len({node.name for node in named.graph.node}) == 3
    assert named.graph.node[0].name == "MatMul_1"
