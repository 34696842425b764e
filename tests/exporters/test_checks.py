"""Every rule hits what it is for and misses what it is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from exporters.check import check
from exporters.checks import RULES
from exporters.finding import SEVERITIES, Finding
from runtime.errors import SourceError

from ..helpers import gemm_model, make_model, save

FLOAT, DOUBLE, INT64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64


def findings(model: onnx.ModelProto, folder: Path, rule: str) -> list[Finding]:
    report = check(save(model, folder / "m.onnx"))
    return [finding for finding in report.findings if finding.rule == rule]


def test_a_sound_model_has_no_errors_or_warnings(tmp_path: Path) -> None:
    report = check(save(gemm_model(), tmp_path / "m.onnx"))
    assert report
    assert {finding.severity for finding in report.findings} <= {"info"}
    assert report.operators == {"Gemm": 1}
    assert report.opsets == {"ai.onnx": 20}


def test_every_finding_has_a_severity_a_reason_and_a_fix(tmp_path: Path) -> None:
    model = gemm_model()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([np.nan, 1], np.float32), "spare"))
    for finding in check(save(model, tmp_path / "m.onnx")).findings:
        assert finding.severity in SEVERITIES
        assert finding.reason
        assert finding.fix


def test_invalid_onnx(tmp_path: Path) -> None:
    (found,) = findings(make_model([helper.make_node("Gemm", ["x"], ["y"])]), tmp_path, "onnx-standard")
    assert found.severity == "error"
    assert not findings(gemm_model(), tmp_path, "onnx-standard")


@pytest.mark.parametrize(
    "operator", ["Cast", "Transpose", "QuantizeLinear", "Softmax", "Sqrt", "Erf", "Gemm", "Reshape", "Loop"]
)
def test_a_node_without_its_inputs_is_an_error_of_the_model_not_of_a_rule(operator: str, tmp_path: Path) -> None:
    report = check(save(make_model([helper.make_node(operator, [], ["y"])]), tmp_path / "m.onnx"), "mobile")
    assert "onnx-standard" in {finding.rule for finding in report.findings if finding.severity == "error"}
    assert report.figures == {}


def test_inconsistent_shapes(tmp_path: Path) -> None:
    wrong = gemm_model()
    wrong.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.zeros((5, 3), np.float32), "W"))
    assert [finding.severity for finding in findings(wrong, tmp_path, "shape-inference")] == ["error"]
    assert not findings(gemm_model(), tmp_path, "shape-inference")


def test_shapes_known_only_at_run_time(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["places"]), helper.make_node("Cast", ["places"], ["y"], to=FLOAT)]
    nodes.insert(1, helper.make_node("Reshape", ["places", "target"], ["moved"]))
    nodes[2].input[0] = "moved"
    model = make_model(nodes, inputs={"x": (FLOAT, [4]), "target": (INT64, ["rank"])}, outputs={"y": (FLOAT, None)})
    assert [finding.severity for finding in findings(model, tmp_path, "shape-inference")] == ["info"]


@pytest.mark.parametrize(("opset", "expected"), [(9, "is old"), (23, "newer than many hosts"), (20, None)])
def test_opsets(opset: int, expected: str | None, tmp_path: Path) -> None:
    warnings = [
        finding.reason for finding in findings(gemm_model(opset=opset), tmp_path, "operators") if finding.severity == "warning"
    ]
    assert len(warnings) == (1 if expected else 0)
    assert not expected or expected in warnings[0]


def test_operators_are_counted_and_foreign_ones_named(tmp_path: Path) -> None:
    model = make_model([helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")], outputs={"y": (FLOAT, ["batch", 4])})
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    reasons = [finding.reason for finding in findings(model, tmp_path, "operators")]
    assert any("com.microsoft::Gelu: not standard" in reason for reason in reasons)
    assert any(reason.startswith("1 nodes:") for reason in reasons)


def reshape_model(shape: list[int]) -> onnx.ModelProto:
    node = helper.make_node("Reshape", ["x", "shape"], ["y"], name="flatten")
    return make_model([node], {"shape": np.array(shape, np.int64)}, outputs={"y": (FLOAT, ["batch", 4])})


def test_a_frozen_axis_is_found_by_running_and_its_node_named(tmp_path: Path) -> None:
    (found,) = findings(reshape_model([2, 4]), tmp_path, "frozen-axes")
    assert found.severity == "error"
    assert "flatten to [2, 4]" in found.node
    assert "fails at 3" in found.reason
    assert not findings(reshape_model([-1, 4]), tmp_path, "frozen-axes")


def test_an_axis_that_silently_gives_another_size_is_found(tmp_path: Path) -> None:
    """Runs at every size, but what comes out is not what is declared."""
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    model = make_model([node], {"shape": np.array([-1, 2], np.int64)}, outputs={"y": (FLOAT, ["batch", 2])})
    (found,) = findings(model, tmp_path, "frozen-axes")
    assert found.severity == "error"


def test_fixed_sizes_are_only_a_remark(tmp_path: Path) -> None:
    model = gemm_model(inputs={"x": (FLOAT, [1, 4])}, outputs={"y": (FLOAT, [1, 3])})
    assert [finding.severity for finding in findings(model, tmp_path, "frozen-axes")] == ["info"]


def test_float64_and_int64_arithmetic(tmp_path: Path) -> None:
    double = make_model(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        inputs={"x": (DOUBLE, ["batch", 4])},
        outputs={"y": (DOUBLE, ["batch", 4])},
    )
    assert "float64" in findings(double, tmp_path, "wide-types")[0].reason
    integer = make_model(
        [helper.make_node("Mul", ["x", "x"], ["y"])], inputs={"x": (INT64, ["batch", 4])}, outputs={"y": (INT64, ["batch", 4])}
    )
    assert "int64" in findings(integer, tmp_path, "int64-indices")[0].reason
    assert not findings(gemm_model(), tmp_path, "wide-types")
    assert not findings(gemm_model(), tmp_path, "int64-indices")


def test_unfolded_constants(tmp_path: Path) -> None:
    nodes = [helper.make_node("Mul", ["b", "b"], ["square"], name="fold_me"), helper.make_node("Add", ["x", "square"], ["y"])]
    model = make_model(nodes, {"b": np.ones(4, np.float32)}, outputs={"y": (FLOAT, ["batch", 4])})
    (found,) = findings(model, tmp_path, "unfolded-constants")
    assert found.node == "fold_me"
    assert found.fix == "run: edgekit optimize"
    assert not findings(gemm_model(), tmp_path, "unfolded-constants")


def test_unused_weights_inputs_and_nodes(tmp_path: Path) -> None:
    model = gemm_model(inputs={"x": (FLOAT, ["batch", 4]), "idle": (FLOAT, [1])})
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(9, np.float32), "spare"))
    model.graph.node.append(helper.make_node("Neg", ["x"], ["nowhere"], name="lost"))
    assert {finding.node for finding in findings(model, tmp_path, "unused")} == {"spare", "idle", "lost"}
    assert not findings(gemm_model(), tmp_path, "unused")


@pytest.mark.parametrize(("value", "expected"), [(np.nan, "NaN"), (np.inf, "infinite"), (1.0, None)])
def test_non_finite_weights(value: float, expected: str | None, tmp_path: Path) -> None:
    model = gemm_model()
    model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(np.array([0, value, 0], np.float32), "b"))
    found = findings(model, tmp_path, "non-finite")
    assert [finding.node for finding in found] == (["b"] if expected else [])
    assert not expected or expected in found[0].reason


def test_missing_external_data_is_one_error_among_the_other_checks(tmp_path: Path) -> None:
    onnx.save(gemm_model(), str(tmp_path / "m.onnx"), save_as_external_data=True, location="w.data", size_threshold=0)
    assert check(tmp_path / "m.onnx")
    (tmp_path / "w.data").unlink()
    report = check(tmp_path / "m.onnx")
    assert not report
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert [(finding.rule, finding.node) for finding in errors] == [("external-data", "w.data")]


def test_cut_and_outside_external_data_are_findings(tmp_path: Path) -> None:
    onnx.save(gemm_model(), str(tmp_path / "m.onnx"), save_as_external_data=True, location="w.data", size_threshold=0)
    (tmp_path / "w.data").write_bytes(b"1234")
    assert "a weights file is shorter" in check(tmp_path / "m.onnx").findings[0].reason
    (tmp_path / "w.data").unlink()
    (tmp_path / "w.data").symlink_to("/etc/hostname")
    assert "outside the model's folder" in check(tmp_path / "m.onnx").findings[0].reason


def test_a_network_with_moving_height_and_width_passes(tmp_path: Path) -> None:
    from exporters.export import export
    from exporters.source import find_source

    path = Path(__file__).with_name("user_networks.py")
    report = export(find_source(f"{path}:normed"), tmp_path / "x.bundle")
    assert check(report.bundle.root)


@pytest.mark.parametrize("frozen", ["batch", "time"])
def test_every_axis_is_tried_not_only_the_batch(frozen: str, tmp_path: Path) -> None:
    shape = np.array([2, -1] if frozen == "batch" else [-1, 2], np.int64)
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    sides = (FLOAT, ["batch", "time"])
    model = make_model([node], {"shape": shape}, inputs={"x": sides}, outputs={"y": sides})
    assert any(repr(frozen) in item.reason for item in findings(model, tmp_path, "frozen-axes"))


@pytest.mark.parametrize("content", [b"", b"not onnx at all"])
def test_what_is_not_onnx_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(SourceError, match="not a readable ONNX model"):
        check(tmp_path / "m.onnx")
    with pytest.raises(SourceError, match="there is no"):
        check(tmp_path / "other.onnx")
    with pytest.raises(SourceError, match=r"without manifest.json"):
        check(tmp_path)


def test_rule_names_are_stable() -> None:
    """Scripts and CI settings name rules: a name may be added here, never changed."""
    assert sorted(rule.name for rule in RULES) == [
        "duplicated-weights",
        "external-data",
        "frozen-axes",
        "int64-indices",
        "non-finite",
        "onnx-standard",
        "operators",
        "recomputed-memory",
        "shape-inference",
        "stray-casts",
        "stray-qdq",
        "stray-transposes",
        "target-axes",
        "target-operators",
        "unfolded-constants",
        "unfused-attention",
        "unfused-gelu",
        "unfused-layernorm",
        "unquantized-gemm",
        "unread-outputs",
        "unsupported",
        "unused",
        "wide-types",
    ]


def test_the_json_report_has_stable_fields(tmp_path: Path) -> None:
    document = check(save(gemm_model(), tmp_path / "m.onnx"), "web").to_json()
    assert list(document) == ["subject", "target", "passed", "findings", "operators", "opsets", "figures"]
    assert document["target"] == "web"
    assert list(document["findings"][0]) == ["rule", "severity", "node", "reason", "fix", "graph"]
    assert list(document["figures"]["m"]) == [
        "sizes",
        "parameters",
        "weight_bytes",
        "flops",
        "peak_activation_bytes",
        "kv_cache_bytes_per_token",
        "state_bytes_per_row",
        "notes",
    ]


def test_every_rule_is_in_the_documentation_and_nothing_else_is() -> None:
    text = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
    documented = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(documented) == sorted(rule.name for rule in RULES)


def test_findings_that_differ_only_in_names_and_numbers_are_grouped(tmp_path: Path) -> None:
    model = gemm_model()
    for index in range(3):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(9 + index, np.float32), f"spare{index}"))
    report = check(save(model, tmp_path / "m.onnx"))
    groups = [group for group in report.groups() if group[0].rule == "unused"]
    assert [[finding.node for finding in group] for group in groups] == [["spare0", "spare1", "spare2"]]
    assert len(report.findings) == 3 + sum(len(group) for group in report.groups() if group[0].rule != "unused")
