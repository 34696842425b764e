"""Someone's .onnx becomes a bundle, or the reason it cannot is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import runtime
from exporters.adopt import adopt
from runtime.errors import ParityRefused, SourceError
from runtime.verify import verify_bundle

from ..helpers import gemm_model, make_model, save

FLOAT, INT64, STRING, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING, TensorProto.BOOL


def test_an_adopted_file_answers_as_before(tmp_path: Path) -> None:
    import onnxruntime

    path = save(gemm_model(), tmp_path / "g.onnx")
    report = adopt(path, tmp_path / "g.bundle")
    x = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    expected = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})[0]
    np.testing.assert_array_equal(runtime.load(report.bundle.root).run({"x": x})["y"], expected)
    assert verify_bundle(report.bundle.root)
    assert report.bundle.manifest.lineage[0]["source"]["kind"] == "onnx"


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 17, 20, 22])
def test_old_and_new_opsets(opset: int, tmp_path: Path) -> None:
    adopt(save(gemm_model(opset=opset), tmp_path / "g.onnx"), tmp_path / "g.bundle")


def test_external_weights_are_taken_in(tmp_path: Path) -> None:
    onnx.save(gemm_model(), str(tmp_path / "g.onnx"), save_as_external_data=True, location="w.data", size_threshold=0)
    bundle = adopt(tmp_path / "g.onnx", tmp_path / "g.bundle").bundle
    (tmp_path / "w.data").unlink()
    assert verify_bundle(bundle.root)


def test_weights_listed_as_inputs_and_axes_without_names(tmp_path: Path) -> None:
    model = gemm_model(inputs={"x": (FLOAT, [None, 4]), "W": (FLOAT, [4, 3])}, outputs={"y": (FLOAT, [None, 3])})
    (spec,) = adopt(save(model, tmp_path / "g.onnx"), tmp_path / "g.bundle").bundle.graph()[1].signature.inputs
    assert spec.shape == ("x_0", 4)


def test_a_graph_with_if_and_a_scalar_input(tmp_path: Path) -> None:
    out = helper.make_tensor_value_info("o", FLOAT, ["batch", 4])
    branches = [helper.make_graph([helper.make_node(kind, ["x"], ["o"])], kind, [], [out]) for kind in ("Neg", "Abs")]
    node = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    model = make_model([node], inputs={"x": (FLOAT, ["batch", 4]), "c": (BOOL, [])}, outputs={"y": (FLOAT, ["batch", 4])})
    report = adopt(save(model, tmp_path / "i.onnx"), tmp_path / "i.bundle")
    x = -np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(runtime.load(report.bundle.root).run({"x": x, "c": np.array(False)})["y"], np.abs(x))


def test_an_axis_of_minus_one_is_dynamic(tmp_path: Path) -> None:
    model = gemm_model()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    (spec,) = adopt(save(model, tmp_path / "g.onnx"), tmp_path / "g.bundle").bundle.graph()[1].signature.inputs
    assert spec.shape == ("x_0", 4)


def test_a_random_graph_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["noise"]), helper.make_node("Add", ["x", "noise"], ["y"])]
    model = make_model(nodes, outputs={"y": (FLOAT, ["batch", 4])})
    with pytest.raises(ParityRefused, match="differs between two runs"):
        adopt(save(model, tmp_path / "r.onnx"), tmp_path / "r.bundle")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "not a readable ONNX model"), (b"garbage in, garbage out", "not a readable ONNX model")],
)
def test_garbage_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(content)
    with pytest.raises(SourceError, match=message):
        adopt(tmp_path / "g.onnx", tmp_path / "g.bundle")


def test_every_truncation_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = gemm_model().SerializeToString()
    for length in range(0, len(whole), 7):
        (tmp_path / "g.onnx").write_bytes(whole[:length])
        with pytest.raises(runtime.EdgekitError) as caught:
            adopt(tmp_path / "g.onnx", tmp_path / "g.bundle")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "g.bundle").exists()


def test_missing_and_outside_weights_are_named(tmp_path: Path) -> None:
    onnx.save(gemm_model(), str(tmp_path / "g.onnx"), save_as_external_data=True, location="w.data", size_threshold=0)
    (tmp_path / "w.data").rename(tmp_path.parent / "w.data")
    with pytest.raises(SourceError, match=r"needs the weights file 'w.data' beside it, which is missing"):
        adopt(tmp_path / "g.onnx", tmp_path / "g.bundle")
    model = onnx.load(str(tmp_path / "g.onnx"), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../w.data"
    save(model, tmp_path / "g.onnx")
    with pytest.raises(SourceError, match="outside"):
        adopt(tmp_path / "g.onnx", tmp_path / "g.bundle")


def test_kinds_of_input_that_are_not_supported_are_named(tmp_path: Path) -> None:
    text = make_model([helper.make_node("Identity", ["x"], ["y"])], inputs={"x": (STRING, [2])}, outputs={"y": (STRING, [2])})
    with pytest.raises(SourceError, match="'x' holds string values, which are not supported"):
        adopt(save(text, tmp_path / "s.onnx"), tmp_path / "s.bundle")
    graph = helper.make_graph(
        [helper.make_node("SequenceAt", ["x", "i"], ["y"])],
        "g",
        [helper.make_tensor_sequence_value_info("x", FLOAT, None), helper.make_tensor_value_info("i", INT64, [])],
        [helper.make_tensor_value_info("y", FLOAT, [2])],
    )
    with pytest.raises(SourceError, match="only tensors are supported"):
        adopt(save(helper.make_model(graph), tmp_path / "q.onnx"), tmp_path / "q.bundle")


def test_an_invalid_graph_is_refused(tmp_path: Path) -> None:
    model = make_model([helper.make_node("Gemm", ["x"], ["y"])])
    with pytest.raises(SourceError, match="breaks the ONNX standard"):
        adopt(save(model, tmp_path / "g.onnx"), tmp_path / "g.bundle")


def test_a_model_that_runs_at_one_size_only_is_refused_with_the_reason(tmp_path: Path) -> None:
    shape = {"shape": np.array([8, 4], np.int64)}
    model = make_model([helper.make_node("Reshape", ["x", "shape"], ["y"])], shape, outputs={"y": (FLOAT, ["batch", 4])})
    with pytest.raises(SourceError, match="none of the sizes tried"):
        adopt(save(model, tmp_path / "r.onnx"), tmp_path / "r.bundle")


def test_an_axis_that_moves_only_in_steps_is_adopted_with_a_note(tmp_path: Path) -> None:
    """Pairs of rows: odd batches fail in the original too."""
    shape = {"shape": np.array([-1, 2, 4], np.int64)}
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["pairs"]),
        helper.make_node("ReduceSum", ["pairs", "axis"], ["y"], keepdims=0),
    ]
    weights = {**shape, "axis": np.array([1], np.int64)}
    model = make_model(nodes, weights, outputs={"y": (FLOAT, ["half", 4])})
    report = adopt(save(model, tmp_path / "r.onnx"), tmp_path / "r.bundle")
    assert any(text.startswith("batch=1:") for text in report.refused_by_reference)
    assert all(case.sizes["batch"] % 2 == 0 for case in report.cases)
