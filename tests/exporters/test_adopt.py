"""Someone's .onnx becomes a bundle, or the reason it cannot is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import runtime
from exporters.adopt import adopt
from runtime.errors import SourceError
from runtime.feeds import batch_axis_of
from runtime.verify import verify_bundle

from ..helpers import gemm_model, make_model, save

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def test_an_adopted_file_answers_as_before(tmp_path: Path) -> None:
    import onnxruntime

    path = save(gemm_model(), tmp_path / "g.onnx")
    report = adopt(path, tmp_path / "g.bundle")
    x = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    expected = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})[0]
    np.testing.assert_array_equal(runtime.load(report.bundle.root).run({"x": x})["y"], expected)
    assert verify_bundle(report.bundle.root)
    assert report.bundle.manifest.lineage[0]["source"]["kind"] == "onnx"


@pytest.mark.parametrize("opset", range(7, 25))
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


def test_a_loop_and_a_scan_are_adopted(tmp_path: Path) -> None:
    """Three turns of v = v + x in a Loop, then a running sum over the rows in a Scan."""
    row = helper.make_tensor_value_info("row", FLOAT, [4])
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["v", "x"], ["v_out"])],
        "turn",
        [
            helper.make_tensor_value_info("turn", INT64, []),
            helper.make_tensor_value_info("go", BOOL, []),
            helper.make_tensor_value_info("v", FLOAT, None),
        ],
        [helper.make_tensor_value_info("go_on", BOOL, []), helper.make_tensor_value_info("v_out", FLOAT, None)],
    )
    step = helper.make_graph(
        [helper.make_node("Add", ["sum", "row"], ["sum_out"]), helper.make_node("Identity", ["sum_out"], ["seen"])],
        "step",
        [helper.make_tensor_value_info("sum", FLOAT, [4]), row],
        [helper.make_tensor_value_info("sum_out", FLOAT, [4]), helper.make_tensor_value_info("seen", FLOAT, [4])],
    )
    nodes = [
        helper.make_node("Loop", ["turns", "yes", "x"], ["looped"], body=body),
        helper.make_node("Scan", ["zeros", "looped"], ["last", "y"], body=step, num_scan_inputs=1),
    ]
    weights = {"turns": np.array(3, np.int64), "yes": np.array(True), "zeros": np.zeros(4, np.float32)}
    model = make_model(nodes, weights, outputs={"y": (FLOAT, ["batch", 4]), "last": (FLOAT, [4])})
    bundle = adopt(save(model, tmp_path / "l.onnx"), tmp_path / "l.bundle").bundle
    x = np.ones((5, 4), np.float32)
    np.testing.assert_array_equal(runtime.load(bundle.root).run({"x": x})["y"][:, 0], [4, 8, 12, 16, 20])


def test_an_output_without_a_shape_gets_the_one_that_came_out(tmp_path: Path) -> None:
    model = gemm_model()
    model.graph.output[0].type.tensor_type.ClearField("shape")
    bundle = adopt(save(model, tmp_path / "g.onnx"), tmp_path / "g.bundle").bundle
    assert bundle.graph()[1].signature.outputs[0].shape == ("y_0", "y_1")


def test_an_output_that_declares_an_untrue_size_is_corrected_and_told(tmp_path: Path) -> None:
    model = gemm_model(outputs={"y": (FLOAT, [1, 3])})
    said: list[str] = []
    bundle = adopt(save(model, tmp_path / "g.onnx"), tmp_path / "g.bundle", progress=said.append).bundle
    assert bundle.graph()[1].signature.outputs[0].shape == ("y_0", 3)
    assert "output y: float32[1, 3] gives other sizes than it declares; the bundle says y: float32[y_0, 3]" in said


def test_a_weight_that_is_not_listed_as_an_input_in_ir_3_is_adopted_for_it_runs(tmp_path: Path) -> None:
    model = gemm_model(opset=8)
    model.ir_version = 3
    adopt(save(model, tmp_path / "g.onnx"), tmp_path / "g.bundle")


def test_a_scalar_input_before_the_others_does_not_hide_the_batch(tmp_path: Path) -> None:
    nodes = [helper.make_node("Mul", ["x", "factor"], ["y"])]
    inputs = {"factor": (FLOAT, []), "x": (FLOAT, ["rows", 4])}
    model = make_model(nodes, inputs=inputs, outputs={"y": (FLOAT, ["rows", 4])})
    bundle = adopt(save(model, tmp_path / "s.onnx"), tmp_path / "s.bundle").bundle
    assert batch_axis_of(bundle.graph()[1].signature) == "rows"


def test_a_graph_of_fixed_sizes_is_proved_on_several_values(tmp_path: Path) -> None:
    model = gemm_model(inputs={"x": (FLOAT, [2, 4])}, outputs={"y": (FLOAT, [2, 3])})
    report = adopt(save(model, tmp_path / "f.onnx"), tmp_path / "f.bundle")
    assert len({case.inputs["x"].tobytes() for case in report.cases}) == 3


def test_a_graph_that_takes_only_integers_is_allowed_the_rounding_of_its_weights(tmp_path: Path) -> None:
    """Nothing can be disturbed at its input; without its weights being disturbed, two sums in another order would refuse it."""
    random = np.random.default_rng(0)
    weights = {"table": random.standard_normal((20, 256)).astype(np.float32)}
    nodes, name = [helper.make_node("Gather", ["table", "ids"], ["h0"])], "h0"
    for layer in range(6):
        weights[f"w{layer}"] = (random.standard_normal((256, 256)) / 16).astype(np.float32)
        nodes.append(helper.make_node("MatMul", [name, f"w{layer}"], [f"h{layer + 1}"]))
        name = f"h{layer + 1}"
    model = make_model(nodes, weights, inputs={"ids": (INT64, ["n"])}, outputs={"h6": (FLOAT, ["n", 256])})
    (tolerance,) = adopt(save(model, tmp_path / "i.onnx"), tmp_path / "i.bundle").tolerance.values()
    assert tolerance.measured > 0
    assert "weights are disturbed by one float32 rounding step" in tolerance.derived
