"""`edgekit quantize --scheme auto`, and limits as a user writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from exporters.adopt import adopt
from exporters.export import export
from exporters.source import find_source
from runtime.bundle import Bundle
from runtime.errors import OptionError
from toolkit.cli import run
from toolkit.quantization import Limits, limit_of

from ..helpers import make_model, save

Shared = Callable[[str, Callable[[Path], object]], Path]
SIZES = {"b": 1.0, "kb": 1e3, "mb": 1e6}


@pytest.fixture
def mlp(shared: Shared) -> Path:
    return shared("mlp-bundle", lambda folder: export(find_source("mlp"), folder / "x.bundle")) / "x.bundle"


@pytest.mark.parametrize(("text", "limit"), [("2MB", 2e6), ("1.5 kb", 1500.0), ("0.3x", 30.0), (".5x", 50.0), (None, None)])
def test_limits_are_absolute_or_shares(text: str | None, limit: float | None) -> None:
    assert limit_of("--max-size", text, SIZES, lambda: 100.0) == limit


def test_a_share_of_the_latency_is_held_against_the_ratio_and_a_time_against_the_time(mlp: Path) -> None:
    bundle = Bundle.open(mlp)
    share, time = (Limits(max_latency=text).budget(bundle) for text in ("0.5X", "5ms"))
    assert (share.max_ratio, share.max_us) == (0.5, None)
    assert (time.max_ratio, time.max_us) == (None, 5000.0)


@pytest.mark.parametrize("text", ["2", "MB", "-1MB", "0x", "2 parsecs", "1e999MB", ""])
def test_a_limit_that_cannot_be_read_is_refused_with_examples(text: str) -> None:
    with pytest.raises(
        OptionError, match="--max-size .* is not understood; write a number with a unit .* or a share such as 0.3x"
    ):
        limit_of("--max-size", text, SIZES, lambda: 100.0)


def test_auto_writes_a_bundle_a_table_and_a_page(mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["quantize", str(mlp), "--scheme", "auto", "--for-size", "--time", "0", "--threads", "1", "-o"]
    page = tmp_path / "tried.html"
    assert run([*command, str(tmp_path / "q.bundle"), "--report", str(page)]) == 0
    text = capsys.readouterr().out
    assert "chosen" in text
    assert "time was up before everything had been tried, and these schemes not at all: int8-weights, " in text
    assert Bundle.open(tmp_path / "q.bundle").graph_bytes < Bundle.open(mlp).graph_bytes
    html = page.read_text()
    assert "<svg" in html
    assert "Every node" in html
    assert "Time was up before everything had been tried, and these schemes not at all: int8-weights, " in html
    assert run([*command, str(tmp_path / "r.bundle"), "--report", str(page)]) == 2
    assert f"--report {page} already exists; choose another file, or pass --force" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))


def test_auto_in_json_has_every_candidate_and_every_node(mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["quantize", str(mlp), "--scheme", "auto", "--for-size", "--time", "0", "--threads", "1", "--json", "-o"]
    assert run([*command, str(tmp_path / "q.bundle")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {item["label"] for item in found["tried"]} >= {found["chosen"]}
    assert all(node["reason"] for node in found["nodes"])
    assert found["report"]["kept"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scheme", "auto", "--only", "Gemm"], "--scheme auto chooses operators and settings itself"),
        (["--scheme", "int8-dynamic", "--time", "5"], "--time is for --scheme auto"),
        (["--scheme", "int8-dynamic", "--report", "x.html"], "--report is for --scheme auto"),
        (["--scheme", "int8-dynamic", "--max-size", "big"], "--max-size 'big' is not understood"),
        (["--scheme", "fp16", "--set", "arithmetic=double"], "expected one of: half, float32"),
        (["--scheme", "int8"], "no scheme named 'int8'"),
    ],
)
def test_misuse_is_told_in_one_line(
    options: list[str], message: str, mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["quantize", str(mlp), "-o", str(tmp_path / "q.bundle"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_size_that_cannot_be_met_is_refused_with_the_figures(
    mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["quantize", str(mlp), "--scheme", "int8-dynamic", "--for-size", "--threads", "1"]
    assert run([*command, "--max-size", "0.1x", "-o", str(tmp_path / "q.bundle")]) == 1
    assert "that --max-size allows" in capsys.readouterr().err
    assert not (tmp_path / "q.bundle").exists()


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """A bundle of one matrix product, without a task."""
    weights = {"w": np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)}
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    shape = (onnx.TensorProto.FLOAT, ["batch", 64])
    model = make_model(nodes, weights, inputs={"x": shape}, outputs={"y": shape})
    return adopt(save(model, tmp_path / "net.onnx"), tmp_path / "net.bundle").bundle.root


@pytest.mark.parametrize("scheme", ["auto", "int8-static"])
@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.full((4, 64), np.nan), "'x' has the value nan in sample 0"),
        (np.zeros((4, 32)), "axis 1 of 'x' is 32 but must be 64"),
        (np.zeros((0, 64)), "holds no samples; pass --data with one or more"),
    ],
)
def test_samples_that_cannot_be_used_are_told_in_one_line(
    scheme: str, samples: np.ndarray, message: str, product: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "x.npz", x=samples.astype(np.float32))
    command = [
        "quantize",
        str(product),
        "--scheme",
        scheme,
        "--data",
        str(tmp_path / "x.npz"),
        "-o",
        str(tmp_path / "q.bundle"),
    ]
    assert run(command) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.glob("q.bundle*"))


def test_too_few_samples_for_the_method_are_told_in_one_line(
    product: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((1, 64), np.float32))
    command = ["quantize", str(product), "--scheme", "int8-static", "--set", "ranges=percentile"]
    assert run([*command, "--data", str(tmp_path / "x.npz"), "-o", str(tmp_path / "q.bundle")]) == 2
    assert "needs 157 calibration samples and there are 1" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.glob("q.bundle*"))


@pytest.mark.parametrize("scheme", ["auto", "int8-dynamic"])
def test_a_graph_with_nothing_to_quantize_is_refused_in_one_line(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = (onnx.TensorProto.FLOAT, ["batch", 64])
    model = make_model([onnx.helper.make_node("Relu", ["x"], ["y"])], {}, inputs={"x": shape}, outputs={"y": shape})
    save(model, tmp_path / "net.onnx")
    command = ["quantize", str(tmp_path / "net.onnx"), "--scheme", scheme, "-o", str(tmp_path / "q.bundle")]
    assert run(command) == 1
    assert capsys.readouterr().err.splitlines()[-1].count("has nothing to quantize here") == 1
    assert not list(tmp_path.glob("q.bundle*"))
