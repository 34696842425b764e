from __future__ import annotations

import json
from pathlib import Path

import pytest

import exporters.optimize
from toolkit.cli import run

from ..exporters.test_heads import logits_bundle
from ..exporters.test_optimize import gelu_bundle, slower


def test_the_table_shows_nodes_places_and_outcomes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bundle = gelu_bundle(tmp_path)
    assert run(["optimize", str(bundle.root), "-o", str(tmp_path / "out.bundle"), "--no-timing"]) == 0
    text = capfd.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith("fuse-gelu"))
    assert "10 → 2" in row
    assert row.endswith("applied (2 places)")
    assert "10 → 2 nodes" in text
    assert f"bundle: {tmp_path / 'out.bundle'}" in text


def test_with_timing_latency_before_and_after_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bundle = gelu_bundle(tmp_path)
    assert run(["optimize", str(bundle.root), "-o", str(tmp_path / "out.bundle"), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    (graph,) = report["graphs"]
    gelu = next(item for item in report["passes"] if item["name"] == "fuse-gelu")
    assert gelu["pace"]
    assert gelu["pace"][0]["ratio"]["low"] <= gelu["pace"][0]["ratio"]["median"] <= gelu["pace"][0]["ratio"]["high"]
    assert graph["pace"] or not report["changed"]


def test_a_pass_that_was_reverted_says_why_below_the_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporters.optimize, "compare_pace", slower(1.08, only="Gelu"))
    assert run(["optimize", str(gelu_bundle(tmp_path).root), "-o", str(tmp_path / "out.bundle")]) == 0
    lines = capfd.readouterr().out.splitlines()
    row, reason = (line for line in lines if line.startswith("fuse-gelu"))
    assert row.endswith("x1.08       reverted")
    assert reason == "fuse-gelu reverted: 1.08 times slower at batch=3"


def test_a_place_left_alone_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import onnx

    model = onnx.load(str(gelu_bundle(tmp_path).graph_path()))
    model.opset_import[0].version = 17
    onnx.save(model, str(tmp_path / "old.onnx"))
    arguments = ["optimize", str(tmp_path / "old.onnx"), "-o", str(tmp_path / "out.bundle"), "--no-timing", "--portable"]
    assert run(arguments) == 0
    text = capfd.readouterr().out
    assert "fuse-gelu left alone: Gelu is a standard operator from opset 20 on" in text
    assert "(2 places)" in text
    assert "fuse-attention" not in text
    assert "nothing to do: the graph is already lean" in text


def test_a_head_is_added(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bundle = logits_bundle(tmp_path)
    arguments = ["optimize", str(bundle.root), "-o", str(tmp_path / "out.bundle"), "--no-timing", "--head", "top-k=2", "--json"]
    assert run(arguments) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["head"] == "top-k=2"
    assert report["changed"]


def test_a_head_that_does_not_exist_is_misuse(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bundle = logits_bundle(tmp_path)
    assert run(["optimize", str(bundle.root), "-o", str(tmp_path / "out.bundle"), "--head", "best"]) == 2
    assert "there is no head 'best'; write argmax, or top-k=8" in capfd.readouterr().err
    assert not (tmp_path / "out.bundle").exists()
