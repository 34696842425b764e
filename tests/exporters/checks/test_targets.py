"""What each target lacks is named, as an error where the model cannot run and as a warning where it runs elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from exporters.check import check
from exporters.checks.tables import ACCELERATORS, TARGETS, accelerated, target_named
from runtime.errors import UnknownName
from runtime.signature import StateSpec

from ...helpers import gemm_bundle, gemm_model, make_model, save
from .support import DOUBLE, FLOAT, HALF, bundle_of, findings, severities, weights


def simple(operator: str, kind: int = FLOAT, domain: str = "", **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node(operator, ["x"], ["y"], name="it", domain=domain, **attributes)
    model = make_model([node], inputs={"x": (kind, ["batch", 4])}, outputs={"y": (kind, ["batch", 4])})
    if domain:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    return model


def test_every_target_has_a_table_with_its_origin() -> None:
    folder = Path(check.__code__.co_filename).with_name("targets")
    assert {path.stem for path in folder.glob("*.toml")} == set(TARGETS)
    for name in TARGETS:
        assert target_named(name).version
        assert target_named(name).origin


def test_listed_operators_exist() -> None:
    """A misspelt name in a table would be a warning nobody deserves."""
    import onnxruntime.capi.onnxruntime_pybind11_state as state

    known = {schema.name for schema in state.get_all_operator_schema()} | {
        schema.name for schema in onnx.defs.get_all_schemas_with_history()
    }
    retired = {"ImageScaler", "ParametricSoftplus", "TransposeMatMul"}
    gpu_only = {"MatMulBlockQuantizedFp4Weight", "MatMulBlockQuantizedFp8Weight", "UnfoldTensor", "DynamicTimeWarping"}
    for target in map(target_named, TARGETS):
        names = {name.split("::")[-1] for name in (*target.operators, *target.missing, *target.types)}
        assert names - known - retired - gpu_only == set()


@pytest.mark.parametrize("target", TARGETS)
def test_a_plain_layer_runs_everywhere(target: str, tmp_path: Path) -> None:
    assert not findings(gemm_model(), tmp_path, "target-operators", target)


def test_what_onnxruntime_cannot_load_is_an_error_on_every_target(tmp_path: Path) -> None:
    model = simple("NoSuchThing", domain="com.microsoft")
    for target in ("cpu", "mobile", "cuda"):
        (found,) = findings(model, tmp_path, "target-operators", target)
        assert found.severity == "error"
        assert "cannot load it" in found.reason
        assert "NoSuchThing" in found.reason
        assert not findings(model, tmp_path, "frozen-axes", target)  # said once


@pytest.mark.parametrize(
    ("target", "operator", "where"),
    [("cuda", "Acos", "the CPU"), ("webgpu", "IsNaN", "the CPU in wasm"), ("tensorrt", "Det", "CUDA or the CPU")],
)
def test_an_operator_that_falls_back_is_a_warning(target: str, operator: str, where: str, tmp_path: Path) -> None:
    if operator == "Det":
        model = make_model([helper.make_node("Det", ["x"], ["y"])], inputs={"x": (FLOAT, [2, 2])}, outputs={"y": (FLOAT, [])})
    elif operator == "IsNaN":
        model = make_model([helper.make_node("IsNaN", ["x"], ["y"])], outputs={"y": (onnx.TensorProto.BOOL, ["batch", 4])})
    else:
        model = simple(operator)
    (found,) = findings(model, tmp_path, "target-operators", target)
    assert found.severity == "warning"
    assert f"has no {operator}: it runs on {where}" in found.reason
    assert not findings(model, tmp_path, "target-operators", "cpu")


def test_a_type_that_a_kernel_does_not_take_falls_back(tmp_path: Path) -> None:
    """GroupQueryAttention on CUDA computes in half precision only."""

    def attention(kind: int) -> onnx.ModelProto:
        names = ["q", "k", "v", "past_k", "past_v", "filled", "total"]
        node = helper.make_node(
            "GroupQueryAttention", names, ["y", "new_k", "new_v"], domain="com.microsoft", num_heads=2, kv_num_heads=2
        )
        rows, cache = (kind, ["batch", "time", 16]), (kind, ["batch", 2, 8, 8])
        counts = {"filled": (onnx.TensorProto.INT32, ["batch"]), "total": (onnx.TensorProto.INT32, [])}
        inputs = {"q": rows, "k": rows, "v": rows, "past_k": cache, "past_v": cache, **counts}
        model = make_model([node], inputs=inputs, outputs={"y": rows, "new_k": cache, "new_v": cache})
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        return model

    (found,) = findings(attention(FLOAT), tmp_path, "target-operators", "cuda")
    assert "GroupQueryAttention on float" in found.reason
    assert not findings(attention(HALF), tmp_path, "target-operators", "cuda")


def test_types_that_the_webgpu_build_leaves_out_are_errors(tmp_path: Path) -> None:
    found = findings(simple("Neg", DOUBLE), tmp_path, "target-operators", "webgpu")
    assert {(finding.severity, finding.node) for finding in found} == {("error", "x"), ("error", "y")}
    assert "is built without double tensors" in found[0].reason
    assert not findings(simple("Neg", DOUBLE), tmp_path, "target-operators", "web")


@pytest.mark.parametrize("target", ["web", "webgpu", "mobile"])
def test_a_layout_made_for_one_cpu_is_an_error_elsewhere(target: str, tmp_path: Path) -> None:
    """onnxruntime writes such nodes when it saves a model it optimized fully for this machine."""
    from exporters.checks.target_operators import _missing
    from exporters.finding import Graph

    model = simple("ReorderInput", domain="com.microsoft.nchwc")
    graph = Graph("m", tmp_path / "m.onnx", model, None)
    assert [finding.severity for finding in _missing(graph, target_named(target))] == ["error"]
    assert not list(_missing(graph, target_named("cpu")))


def test_unsigned_quantized_values_are_refused_by_tensorrt(tmp_path: Path) -> None:
    def dequantize(kind: type) -> onnx.ModelProto:
        constants = {"W": np.ones((4, 4), kind), "s": np.array(0.1, np.float32), "z": np.array(0, kind)}
        nodes = [helper.make_node("DequantizeLinear", ["W", "s", "z"], ["D"]), helper.make_node("MatMul", ["x", "D"], ["y"])]
        return make_model(nodes, constants, outputs={"y": (FLOAT, ["batch", 4])})

    (found,) = findings(dequantize(np.uint8), tmp_path, "target-operators", "tensorrt")
    assert "DequantizeLinear on uint8" in found.reason
    assert not findings(dequantize(np.int8), tmp_path, "target-operators", "tensorrt")


def test_a_phone_gets_a_real_conversion_and_a_count_of_what_its_accelerators_leave(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Det", ["h"], ["y"], name="det")]
    model = make_model(nodes, inputs={"x": (FLOAT, [2, 2])}, outputs={"y": (FLOAT, [])})
    found = findings(model, tmp_path, "target-operators", "mobile")
    assert severities(found) == ["info", "info"]
    assert [finding.reason.split()[0] for finding in found] == list(ACCELERATORS)
    assert "leaves 1 of 2 nodes to the CPU: 1 Det" in found[0].reason


def test_accelerator_tables_are_read_from_the_installed_package() -> None:
    for accelerator in ACCELERATORS:
        assert {"Conv", "Gemm", "ReduceMean"} <= accelerated(accelerator)
        assert "LSTM" not in accelerated(accelerator)
    assert "ReduceSum" in accelerated("CoreML")


def test_a_failed_conversion_to_ort_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from exporters.checks import target_operators

    real = target_operators._load_fault
    monkeypatch.setattr(
        target_operators, "_load_fault", lambda path, save_as=None: "no room" if save_as is not None else real(path)
    )
    found = findings(gemm_model(), tmp_path, "target-operators", "mobile")
    assert [(finding.severity, finding.reason) for finding in found] == [("error", "it cannot be converted to .ort: no room")]


@pytest.mark.parametrize(("target", "wants"), [("mobile", "NNAPI"), ("webgpu", "graph capture"), ("tensorrt", "profile")])
def test_axes_that_vary_where_a_target_wants_them_fixed(target: str, wants: str, tmp_path: Path) -> None:
    bundle = gemm_bundle(tmp_path)
    (found,) = findings(bundle, tmp_path, "target-axes", target)
    assert found.severity == "warning"
    assert found.reason.startswith("batch varies:")
    assert wants in found.reason
    assert "edgekit export --fix batch=1" in found.fix
    fixed = gemm_model(inputs={"x": (FLOAT, [1, 4])}, outputs={"y": (FLOAT, [1, 3])})
    assert not findings(fixed, tmp_path, "target-axes", target)


@pytest.mark.parametrize("target", ["cpu", "cuda", "web"])
def test_other_targets_take_any_size(target: str, tmp_path: Path) -> None:
    assert not findings(gemm_model(), tmp_path, "target-axes", target)


def test_the_sizes_of_the_goldens_are_proposed(tmp_path: Path) -> None:
    node = helper.make_node("Concat", ["past", "x"], ["present"], axis=1)
    sides = {"x": (FLOAT, ["batch", "time", 4]), "past": (FLOAT, ["batch", "past", 4])}
    model = make_model([node], inputs=sides, outputs={"present": (FLOAT, ["batch", "total", 4])})
    feeds = {"step": {"x": weights(2, 3, 4), "past": weights(2, 5, 4)}}
    bundle = bundle_of(tmp_path, {"step": model}, {"step": (StateSpec("past", "present", 0, 1),)}, feeds)
    (found,) = findings(bundle, tmp_path, "target-axes", "tensorrt")
    assert "--fix batch=1 --fix time=3 --fix past=5" in found.fix


def test_sizes_that_depend_on_data(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["y"], name="where")]
    model = make_model(nodes, inputs={"x": (FLOAT, [4])}, outputs={"y": (onnx.TensorProto.INT64, [1, "found"])})
    (found,) = findings(model, tmp_path, "target-axes", "webgpu")
    assert found.node == "where"
    assert "depends on the data" in found.reason


def test_an_unknown_target_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="no target named 'gpu'; .*known: cpu, cuda, mobile, tensorrt, web, webgpu"):
        check(save(gemm_model(), tmp_path / "m.onnx"), "gpu")
