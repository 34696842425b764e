"""One command from a recipe to a report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.bundle import is_bundle
from runtime.verify import verify_bundle
from toolkit.cli import run
from toolkit.report.plot import Point, draw, ticks

from ..helpers import gemm_model, leftovers, save


@pytest.fixture(scope="module")
def report_folder(shared: Callable[[str, Callable[[Path], object]], Path], trained: Callable[[str], Path]) -> Path:
    def make(folder: Path) -> None:
        schemes = ["--scheme", "int8-static", "--scheme", "fp16"]
        code = run(["deploy", str(trained("mlp")), "-o", str(folder / "report"), *schemes])
        assert code in (0, 1)  # 1 if this machine finds every scheme slower: its verdict, not a fault

    return shared("deployed-mlp", make) / "report"


def test_the_report_tells_the_whole_story(report_folder: Path) -> None:
    page = (report_folder / "report.html").read_text()
    for heading in ("Size, latency and quality", "Variants", "Run it", "Parity", "Graph check", "Lineage", "Machine"):
        assert heading in page
    assert "<svg" in page
    document = json.loads((report_folder / "report.json").read_text())
    names = [item["name"] for item in document["variants"]]
    assert names[:2] == ["torch", "fp32"]
    assert "int8-static" in names
    winner = next(item for item in document["variants"] if item["name"] == document["winner"])
    assert is_bundle(report_folder / winner["bundle"])
    assert verify_bundle(report_folder / winner["bundle"])
    assert document["same_answers"][0] == document["same_answers"][1]
    assert all(item["latency"]["median"] > 0 for item in document["variants"] if item["verdict"] != "refused")


def test_the_page_needs_no_network(report_folder: Path) -> None:
    page = (report_folder / "report.html").read_text()
    assert not re.search(r"https?://|<script|<link|src=|@import|url\(", page)


def test_the_sample_can_be_run_as_the_page_says(report_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = json.loads((report_folder / "report.json").read_text())
    winner = next(item for item in document["variants"] if item["name"] == document["winner"])
    assert run(["run", str(report_folder / winner["bundle"]), "--input", str(report_folder / "sample.npz")]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 5


def test_an_onnx_file_is_deployed_without_pytorch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(gemm_model(), tmp_path / "g.onnx")
    assert run(["deploy", str(tmp_path / "g.onnx"), "-o", str(tmp_path / "out")]) == 0
    text = capfd.readouterr().out
    assert "refused int8-dynamic" in text
    assert "report:" in text
    assert not [path for path in (tmp_path / "out").iterdir() if path.name == "optimized.bundle"]


def test_a_recipe_with_its_own_data_is_deployed_and_leaks_no_path(tmp_path: Path) -> None:
    rows = "\n".join(f"{i % 7},{i % 5},{'yes' if i % 7 > 3 else 'no'}" for i in range(100))
    (tmp_path / "d.csv").write_text(f"a,b,label\n{rows}\n")
    recipe = f'architecture = "mlp"\n[data]\npath = "{tmp_path}/d.csv"\n[training]\nepochs = 2\nthreads = 1\n'
    (tmp_path / "own.toml").write_text(recipe)
    code = run(["deploy", str(tmp_path / "own.toml"), "-o", str(tmp_path / "out"), "--scheme", "fp16"])
    document = (tmp_path / "out" / "report.json").read_text()
    kept = any(item["name"] == "fp16" and item["verdict"] == "kept" for item in json.loads(document)["variants"])
    assert code == (0 if kept else 1)
    assert str(tmp_path) not in document


def test_a_deployment_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def build():\n    raise ValueError('no')\n")
    assert run(["deploy", f"{tmp_path}/bad.py:build", "-o", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == []


def test_ticks_are_round_and_labels_escape_html() -> None:
    assert ticks(90, 2100) == [100, 200, 500, 1000, 2000]
    svg = draw([Point("<b>", 10, 20, 9, 11, "1 %", "kept"), Point("x", 10, 20, 9, 11, "", "refused")], str, str)
    assert "&lt;b&gt;" in svg
    assert "<b>" not in svg
    assert draw([], str, str) == ""


def test_the_longest_label_of_a_plot_is_within_the_picture() -> None:
    label = "int8-static without convolutions of under 32 channels + fp16 stored"
    svg = draw([Point("fp32", 10, 20, 9, 11, "", "reference"), Point(label, 5, 20, 4, 6, "99.44 %", "winner")], str, str)
    picture = re.search(r'viewBox="0 0 (\d+)', svg)
    place = re.search(r'class="label winner" x="([\d.]+)"', svg)
    assert picture is not None
    assert place is not None
    assert float(place[1]) + 6.9 * len(f"{label} 99.44 %") < int(picture[1])


def test_a_text_recipe_is_refused_before_it_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["deploy", "gpt", "-o", str(tmp_path / "out")]) == 2
    assert (
        "gpt takes text, and deploy measures networks on images and columns only; go step by step: edgekit train, export"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
