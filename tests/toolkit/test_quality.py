"""What quantized variants are judged by where there are no labels, and how data reaches graphs of a fixed batch."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path

import numpy as np
import onnx
import pytest

from exporters.adopt import adopt
from runtime.bundle import Bundle
from toolkit.cli import run
from toolkit.console import print_json
from toolkit.evaluation import predict_all, quality_for

from ..helpers import make_model, save


def bundle_of(nodes: list[onnx.NodeProto], folder: Path, name: str, outputs: str = "yz", rows: int | str = "batch") -> Bundle:
    weights = {
        "w": np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32),
        "mask": np.where(np.arange(64) % 2, 0.0, -np.inf).astype(np.float32),
        "hundred": np.array(100.0, np.float32),
    }
    used = {key for node in nodes for key in node.input}
    shape = (onnx.TensorProto.FLOAT, [rows, 64])
    kept = {key: array for key, array in weights.items() if key in used}
    model = make_model(nodes, kept, inputs={"x": shape}, outputs=dict.fromkeys(outputs, shape))
    return adopt(save(model, folder / f"{name}.onnx"), folder / f"{name}.bundle").bundle


def samples(folder: Path, rows: int = 10) -> str:
    np.savez(folder / "x.npz", x=np.random.default_rng(1).standard_normal((rows, 64)).astype(np.float32))
    return str(folder / "x.npz")


PRODUCT = onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="product")


def test_an_output_that_is_no_number_any_more_is_seen_wherever_it_is(tmp_path: Path) -> None:
    right = [PRODUCT, onnx.helper.make_node("Exp", ["x"], ["z"])]
    wrong = [PRODUCT, onnx.helper.make_node("Add", ["x", "hundred"], ["m"]), onnx.helper.make_node("Sqrt", ["m"], ["z"])]
    values = np.ones((3, 64), np.float32)
    values[1, 2] = -200
    np.savez(tmp_path / "x.npz", x=values)
    quality, _ = quality_for(bundle_of(right, tmp_path, "right"), str(tmp_path / "x.npz"))
    assert isnan(quality.measure(bundle_of(wrong, tmp_path, "wrong")))


def test_what_a_mask_makes_infinite_is_no_reason_to_refuse(tmp_path: Path) -> None:
    masked = [PRODUCT, onnx.helper.make_node("Add", ["y", "mask"], ["z"])]
    other = [PRODUCT, onnx.helper.make_node("Identity", ["y"], ["z"])]
    original = bundle_of(masked, tmp_path, "masked")
    quality, _ = quality_for(original, samples(tmp_path))
    assert quality.measure(original) == pytest.approx(100.0)
    assert isnan(quality.measure(bundle_of(other, tmp_path, "other")))


@pytest.mark.parametrize("fixed", [1, 4])
def test_a_graph_of_a_fixed_batch_is_calibrated_and_judged_on_all_samples(fixed: int, tmp_path: Path) -> None:
    bundle = bundle_of([PRODUCT], tmp_path, "fixed", outputs="y", rows=fixed)
    path = samples(tmp_path)
    quality, calibration = quality_for(bundle, path)
    assert calibration is not None
    batches = [feeds["x"] for feeds in calibration("model")]
    assert {batch.shape for batch in batches} == {(fixed, 64)}
    np.testing.assert_array_equal(np.concatenate(batches)[:10], np.load(path)["x"])
    assert quality.measure(bundle) == pytest.approx(100.0)
    assert predict_all(bundle, np.load(path)["x"]).shape == (10, 64)


def test_inputs_of_different_lengths_are_refused(tmp_path: Path) -> None:
    shape = (onnx.TensorProto.FLOAT, [1, 64])
    model = make_model(
        [onnx.helper.make_node("Add", ["x", "v"], ["y"])], {}, inputs={"x": shape, "v": shape}, outputs={"y": shape}
    )
    save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones((3, 64), np.float32), v=np.ones((2, 64), np.float32))
    command = ["quantize", str(tmp_path / "net.onnx"), "--scheme", "auto", "--data", str(tmp_path / "x.npz")]
    assert run([*command, "-o", str(tmp_path / "q.bundle")]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--report", "nowhere/tried.html"], "there is no folder nowhere; make it, or name another file"),
        (["--report", "."], "is a folder; name a file in it"),
        (["--batch", "4"], "this graph has a fixed batch of 1"),
    ],
)
def test_auto_tells_what_cannot_be_before_it_tries_anything(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = bundle_of([PRODUCT], tmp_path, "net", outputs="y", rows=1)
    assert run(["quantize", str(bundle.root), "--scheme", "auto", "-o", str(tmp_path / "q.bundle"), *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.glob("q.bundle*"))


def test_what_is_no_number_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"drop": float("nan"), "all": [1.5, (float("inf"), "x")], "none": None})
    assert json.loads(capsys.readouterr().out) == {"drop": None, "all": [1.5, [None, "x"]], "none": None}
