"""What cannot be adopted is refused in one line that names the cause and the way out, and leaves nothing behind."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from exporters import loading
from exporters.adopt import adopt
from exporters.check import check
from exporters.reduced import reduced_tolerance
from runtime.errors import EdgekitError, FeedError, ParityRefused, SourceError
from runtime.feeds import example_feeds
from runtime.signature import GraphSignature, TensorSpec
from toolkit.cli import run

from ..helpers import gemm_model, make_model, save

FLOAT, INT64, STRING, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING, TensorProto.BOOL
Node = helper.make_node
HOST = f"onnxruntime {onnxruntime.__version__}"
TENSOR = helper.make_tensor_type_proto(FLOAT, [2])


def refusal(model: onnx.ModelProto, folder: Path, kind: type[EdgekitError] = SourceError) -> str:
    with pytest.raises(kind) as caught:
        adopt(save(model, folder / "m.onnx"), folder / "m.bundle")
    assert "\n" not in str(caught.value)
    assert not (folder / "m.bundle").exists()
    return str(caught.value).removeprefix(f"{folder / 'm.onnx'} ")


def test_a_newer_ir_version_is_named(tmp_path: Path) -> None:
    model = gemm_model()
    model.ir_version = 99
    text = refusal(model, tmp_path)
    assert text.startswith(f"has IR version 99, and {HOST} reads up to ")
    assert "upgrade onnxruntime, or save it with ir_version = " in text


def test_an_opset_that_onnxruntime_does_not_have_yet_is_named(tmp_path: Path) -> None:
    text = refusal(gemm_model(opset=99), tmp_path)
    assert text.startswith(f"uses opset 99, and {HOST} runs up to ")
    assert text.endswith(" or lower")


def test_an_opset_that_is_too_old_is_named(tmp_path: Path) -> None:
    expected = f"uses opset 6, whose Gemm {HOST} does not run; convert it to opset 7 or later with onnx.version_converter"
    assert refusal(gemm_model(opset=6), tmp_path) == expected


def test_an_old_opset_that_onnxruntime_runs_is_adopted(tmp_path: Path) -> None:
    model = make_model([Node("Relu", ["x"], ["y"])], outputs={"y": (FLOAT, ["batch", 4])}, opset=6)
    adopt(save(model, tmp_path / "m.onnx"), tmp_path / "m.bundle")


@pytest.mark.parametrize("imported", [True, False])
def test_an_operator_of_an_unknown_domain_is_named(imported: bool, tmp_path: Path) -> None:
    model = make_model([Node("Sparkle", ["x"], ["y"], domain="com.acme")], outputs={"y": (FLOAT, ["batch", 4])})
    if imported:
        model.opset_import.append(helper.make_opsetid("com.acme", 1))
    text = refusal(model, tmp_path)
    assert text == (
        f"uses the operator Sparkle of the domain 'com.acme', which {HOST} does not know; "
        "export it again with standard operators"
    )


def test_an_operator_that_the_opset_does_not_have_is_named(tmp_path: Path) -> None:
    model = make_model([Node("Gelu", ["x"], ["y"])], outputs={"y": (FLOAT, ["batch", 4])}, opset=13)
    assert refusal(model, tmp_path).startswith("uses the operator Gelu, which opset 13 does not have; export it again with")


def test_a_type_that_an_operator_has_no_code_for_is_named(tmp_path: Path) -> None:
    shape = (TensorProto.DOUBLE, ["batch", 4])
    text = refusal(make_model([Node("Atan", ["x"], ["y"])], inputs={"x": shape}, outputs={"y": shape}), tmp_path)
    assert text == f"uses Atan on a type that {HOST} has no code for; export it again in float32"


def test_an_invalid_graph_is_refused(tmp_path: Path) -> None:
    text = refusal(make_model([Node("Gemm", ["x"], ["y"])]), tmp_path)
    assert text.startswith("breaks the ONNX standard: ")
    assert text.endswith("; export it again from its framework")


def test_a_graph_that_the_standard_takes_and_onnxruntime_does_not_is_refused_with_its_words(tmp_path: Path) -> None:
    text = refusal(make_model([Node("Add", ["x", "one"], ["y"])], {"one": np.array(1, np.int64)}), tmp_path)
    assert text.startswith(f"cannot be loaded by {HOST}: ")
    assert "bound to different types" in text


def test_a_graph_too_large_for_one_message_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_LARGEST", 100)
    text = refusal(gemm_model(), tmp_path)
    assert "bytes, and a graph with its weights inside it may have 100; store its weights in a narrower type" in text


def _model_of(value: onnx.ValueInfoProto, operator: str) -> onnx.ModelProto:
    node = Node(operator, [value.name, *(["i"] if operator == "SequenceAt" else [])], ["y"])
    inputs = [value, *([helper.make_tensor_value_info("i", INT64, [])] if operator == "SequenceAt" else [])]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", FLOAT, [2])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _map_type() -> onnx.TypeProto:
    kind = onnx.TypeProto()
    kind.map_type.key_type = INT64
    kind.map_type.value_type.CopyFrom(TENSOR)
    return kind


UNSUPPORTED: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "string": (
        lambda: make_model([Node("Identity", ["x"], ["y"])], inputs={"x": (STRING, [2])}, outputs={"y": (STRING, [2])}),
        "input 'x' holds string values, which are not supported",
    ),
    "float8": (
        lambda: _model_of(helper.make_tensor_value_info("x", TensorProto.FLOAT8E4M3FN, [2]), "Cast"),
        "input 'x' holds float8e4m3fn values, which are not supported",
    ),
    "sequence": (
        lambda: _model_of(helper.make_value_info("x", helper.make_sequence_type_proto(TENSOR)), "SequenceAt"),
        "input 'x' is of the kind 'sequence', and only tensors are supported",
    ),
    "optional": (
        lambda: _model_of(helper.make_value_info("x", helper.make_optional_type_proto(TENSOR)), "OptionalGetElement"),
        "input 'x' is of the kind 'optional', and only tensors are supported",
    ),
    "map": (
        lambda: _model_of(helper.make_value_info("x", _map_type()), "Identity"),
        "input 'x' is of the kind 'map', and only tensors are supported",
    ),
    "sparse": (
        lambda: _model_of(helper.make_value_info("x", helper.make_sparse_tensor_type_proto(FLOAT, [2])), "Identity"),
        "input 'x' is of the kind 'sparse tensor', and only tensors are supported",
    ),
    "shapeless": (
        lambda: _model_of(helper.make_tensor_value_info("x", FLOAT, None), "Relu"),
        "input 'x' declares no shape, so not even its number of axes is known",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_inputs_that_are_not_supported_are_named_by_export_and_by_check(kind: str, tmp_path: Path) -> None:
    make, reason = UNSUPPORTED[kind]
    assert refusal(make(), tmp_path).startswith(f"cannot be adopted: {reason}; ")
    (finding,) = [item for item in check(tmp_path / "m.onnx").findings if item.rule == "unsupported"]
    assert (finding.severity, finding.reason) == ("error", reason)
    assert finding.fix


def test_what_to_do_about_an_input_without_a_shape_works(tmp_path: Path) -> None:
    model = UNSUPPORTED["shapeless"][0]()
    advice = refusal(model, tmp_path).split("for axes that vary: ")[1]
    call = ast.parse(advice, mode="eval").body
    assert isinstance(call, ast.Call)
    assert ast.unparse(call.func) == "onnx.helper.make_tensor_value_info"
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info(*map(ast.literal_eval, call.args)))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    adopt(save(model, tmp_path / "m.onnx"), tmp_path / "m.bundle")


def test_a_sequence_that_comes_out_is_named(tmp_path: Path) -> None:
    iris = Path(onnxruntime.__file__).parent / "datasets" / "logreg_iris.onnx"
    text = refusal(onnx.load(str(iris)), tmp_path)
    assert "output 'probabilities' is of the kind 'sequence', and only tensors are supported; leave it out" in text


def test_bfloat16_at_the_edge_of_a_graph_is_named(tmp_path: Path) -> None:
    model = make_model(
        [Node("Cast", ["x"], ["y"], to=FLOAT)], inputs={"x": (TensorProto.BFLOAT16, [2])}, outputs={"y": (FLOAT, [2])}
    )
    assert "'x' holds bfloat16 values, which numpy has no type for; cast it to float32" in refusal(model, tmp_path)
    check(tmp_path / "m.onnx")
    with pytest.raises(FeedError, match="input 'x' holds bfloat16 values, which numpy has no type for; cast it to float32"):
        example_feeds(GraphSignature((TensorSpec("x", "bfloat16", ("n",)),), ()), {"n": 2})


def test_a_model_that_runs_at_one_size_only_is_refused_with_the_reason(tmp_path: Path) -> None:
    shape = {"shape": np.array([8, 4], np.int64)}
    model = make_model([Node("Reshape", ["x", "shape"], ["y"])], shape, outputs={"y": (FLOAT, ["batch", 4])})
    text = refusal(model, tmp_path)
    assert text.startswith("runs at none of the sizes tried; at sizes of 1: onnxruntime could not run")
    assert text.endswith("fix its axes with onnx.tools.update_model_dims to sizes it takes, then export that")


def _noisy(operator: str) -> onnx.ModelProto:
    if operator == "Dropout":
        weights = {"ratio": np.array(0.5, np.float32), "training": np.array(True)}
        shape = (FLOAT, ["batch", 64])  # of a few elements two runs may drop the same
        return make_model(
            [Node("Dropout", ["x", "ratio", "training"], ["y"])], weights, inputs={"x": shape}, outputs={"y": shape}
        )
    inputs = ["x"] if operator.endswith("Like") else []
    node = Node(operator, inputs, ["noise"], **({} if inputs else {"shape": [1, 4]}))
    return make_model([node, Node("Add", ["x", "noise"], ["y"])], outputs={"y": (FLOAT, ["batch", 4])})


@pytest.mark.parametrize("operator", ["RandomNormal", "RandomNormalLike", "RandomUniform", "Dropout"])
def test_a_random_graph_is_refused(operator: str, tmp_path: Path) -> None:
    assert "output 'y' differs between two runs on the same inputs" in refusal(_noisy(operator), tmp_path, ParityRefused)


def test_a_graph_that_only_gives_nan_is_refused(tmp_path: Path) -> None:
    nodes = [Node("Sub", ["x", "x"], ["zero"]), Node("Div", ["zero", "zero"], ["y"])]
    text = refusal(make_model(nodes, outputs={"y": (FLOAT, ["batch", 4])}), tmp_path, ParityRefused)
    assert text == "output 'y' has NaN values in the original itself, so nothing can be compared"


def test_a_coarse_graph_whose_answer_is_mostly_rounding_is_refused() -> None:
    feeds = [{"x": np.ones(3, np.float32)}]
    with pytest.raises(
        ParityRefused, match=r"'y' changes by 5.00e-01 between two ways to run the same int8 graph, .*1.00e\+00"
    ):
        reduced_tolerance("int8", lambda inputs: {"y": inputs["x"]}, (lambda inputs: {"y": 0.5 * inputs["x"]},), feeds)
    with pytest.raises(ParityRefused, match="'y' has NaN values in the original itself"):
        reduced_tolerance("fp16", lambda inputs: {"y": inputs["x"] * np.nan}, (lambda inputs: {"y": inputs["x"]},), feeds)


def test_the_command_refuses_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(save(UNSUPPORTED["sequence"][0](), tmp_path / "m.onnx"))
    for verb in (["export", path, "-o", str(tmp_path / "m.bundle")], ["check", path]):
        assert run(verb) in (1, 2)
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        assert "only tensors are" in " ".join((said.out + said.err).split())
