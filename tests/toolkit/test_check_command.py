"""`edgekit check` in the terminal: within 80 columns, equal findings together, exit codes that CI can use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from exporters.checks.tables import TARGETS
from runtime.signature import StateSpec
from toolkit.cli import run
from toolkit.commands import check as command

from ..exporters.checks.support import FLOAT, bundle_of, weights
from ..helpers import gemm_model, make_model, save


def cluttered(count: int) -> onnx.ModelProto:
    """A model with `count` weights that nothing reads."""
    model = gemm_model()
    for index in range(count):
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.ones(9 + index, np.float32), f"model.layer.{index}.spare")
        )
    return model


def test_fifty_equal_findings_are_one_paragraph_of_80_columns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(save(cluttered(50), tmp_path / "m.onnx"))]) == 0
    printed = capfd.readouterr().out
    assert "warning [unused] ×50 model.layer.0.spare: no node reads this weight" in printed
    assert "also: model.layer.1.spare" in printed
    assert "and 45 more" in " ".join(printed.split())
    assert printed.count("fix:") == 1
    assert max(map(len, printed.splitlines())) <= 80
    assert "0 errors, 50 warnings" in printed


def test_the_json_has_all_of_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(save(cluttered(5), tmp_path / "m.onnx")), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert sum(finding["rule"] == "unused" for finding in document["findings"]) == 5
    assert document["figures"]["m"]["flops"] == 24


def test_a_target_and_fail_on_warning_decide_the_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(save(gemm_model(), tmp_path / "m.onnx"))
    assert run(["check", path, "--fail-on", "warning"]) == 0
    assert run(["check", path, "--target", "tensorrt"]) == 0
    assert run(["check", path, "--target", "tensorrt", "--fail-on", "warning"]) == 1
    assert "[target-axes] batch varies" in capfd.readouterr().out
    assert run(["check", path, "--target", "toaster"]) == 2
    assert "toaster" in capfd.readouterr().err


def test_the_command_offers_every_target() -> None:
    assert command.params[1].type.choices == TARGETS  # type: ignore[attr-defined]


def test_figures_of_several_graphs_are_one_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sides = (FLOAT, ["batch", "time", 4])
    encoder = make_model(
        [helper.make_node("MatMul", ["x", "W"], ["memory"])],
        {"W": weights(4, 4)},
        inputs={"x": sides},
        outputs={"memory": sides},
    )
    cached = (FLOAT, ["batch", "past", 4])
    step = make_model(
        [helper.make_node("Concat", ["past", "memory"], ["present"], axis=1)],
        inputs={"past": cached, "memory": sides},
        outputs={"present": (FLOAT, ["batch", "total", 4])},
    )
    feeds = {"encoder": {"x": weights(2, 3, 4)}, "step": {"past": weights(2, 5, 4), "memory": weights(2, 3, 4)}}
    bundle = bundle_of(tmp_path, {"encoder": encoder, "step": step}, {"step": (StateSpec("past", "present", 0, 1),)}, feeds)
    assert run(["check", str(bundle)]) == 0
    lines = capfd.readouterr().out.splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("graph"))) :]
    assert table[2].split() == ["encoder", "16", "64", "B", "192", "192", "B", "-"]
    assert table[3].split()[0] == "step"
    assert table[3].split()[-2:] == ["16", "B"]
    assert "encoder: at batch=2, time=3" in table
    assert "step: at batch=2, past=5, time=3" in table


def test_list_names_the_checks(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "checks"]) == 0
    assert "unfused-attention" in capfd.readouterr().out
