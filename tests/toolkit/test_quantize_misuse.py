"""`edgekit quantize` on what it cannot do: told in one line, before anything is measured; nothing of the user's is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from exporters.export import export
from exporters.source import find_source
from runtime.verify import verify_bundle
from toolkit.cli import run

from ..helpers import make_model, save

WIDTH = 64
SHAPE = (TensorProto.FLOAT, ["batch", WIDTH])
Capture = pytest.CaptureFixture[str]
Shared = Callable[[str, Callable[[Path], object]], Path]


def product(**shapes: Any) -> onnx.ModelProto:
    weights = {"w": (np.random.default_rng(0).standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32)}
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    return make_model([node], weights, inputs={"x": SHAPE}, outputs={"y": SHAPE} | shapes)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return save(product(), tmp_path / "net.onnx")


@pytest.fixture
def mlp(shared: Shared) -> Path:
    return shared("mlp-bundle", lambda folder: export(find_source("mlp"), folder / "x.bundle")) / "x.bundle"


def refused(net: Path, capsys: Capture, *options: object, scheme: str = "int8-dynamic", code: int = 2) -> str:
    """The last line of what is said; nothing is written beside what was there."""
    before = {path: path.read_bytes() for path in sorted(net.parent.rglob("*")) if path.is_file()}
    output = net.parent / "q.bundle"
    assert run(["quantize", str(net), "--scheme", scheme, "-o", str(output), *map(str, options)]) == code
    assert {path: path.read_bytes() for path in sorted(net.parent.rglob("*")) if path.is_file()} == before
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-drop", "nan"], "'nan' is no amount; write a number, e.g. 0.5"),
        (["--time", "nan"], "'nan' is no amount"),
        (["--threads", "100000"], "100000 is not in the range 1<=x<=1024"),
        (["--max-size", "1" + "0" * 400 + "MB"], "--max-size is too large a number to be a limit; leave it out"),
    ],
)
def test_numbers_that_limit_nothing(options: list[str], message: str, net: Path, capsys: Capture) -> None:
    assert message in refused(net, capsys, *options, scheme="auto")


def test_data_that_is_no_archive_of_arrays(net: Path, capsys: Capture) -> None:
    single, garbage = net.with_name("x.npy"), net.with_name("x.csv")
    np.save(single, np.zeros((4, WIDTH), np.float32))
    garbage.write_text("a,b\n1,2\n")
    for path in (single, garbage):
        assert f"{path} cannot be read as .npz; save named arrays with np.savez" in refused(net, capsys, "--data", path)
    missing = net.with_name("none.npz")
    assert f"{missing} is not there, or is a folder; expected an .npz file" in refused(net, capsys, "--data", missing)


def test_a_graph_without_inputs_and_one_in_float64(tmp_path: Path, capsys: Capture) -> None:
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((WIDTH, WIDTH)).astype(np.float32) for name in "ab"}
    node = helper.make_node("MatMul", ["a", "b"], ["y"], name="product")
    model = make_model([node], weights, outputs={"y": (TensorProto.FLOAT, [WIDTH, WIDTH])})
    del model.graph.input[:]
    net = save(model, tmp_path / "none.onnx")
    assert run(["quantize", str(net), "--scheme", "int8-dynamic", "--for-size", "-o", str(tmp_path / "n.bundle")]) == 0
    assert verify_bundle(tmp_path / "n.bundle")
    wide = {"w": random.standard_normal((WIDTH, WIDTH))}
    shape = (TensorProto.DOUBLE, ["batch", WIDTH])
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    double = save(make_model([node], wide, inputs={"x": shape}, outputs={"y": shape}), tmp_path / "double.onnx")
    message = refused(double, capsys, code=1)
    assert "double.onnx computes in float64, and quantize takes float32; export it in float32" in message


def test_a_quantized_file_is_called_by_its_name(net: Path, capsys: Capture, tmp_path: Path) -> None:
    assert run(["quantize", str(net), "--scheme", "fp16", "--for-size", "-o", str(tmp_path / "h.bundle")]) == 0
    capsys.readouterr()
    model = onnx.load(tmp_path / "h.bundle" / "model.onnx")
    half = save(model, net.parent / "half.onnx")
    assert "half.onnx is already fp16; quantize its fp32 parent instead" in refused(half, capsys, code=1)


@pytest.mark.parametrize("name", ["q" * 250, "x.bundle"])
def test_an_output_that_cannot_be_written_is_told_before_anything_is_measured(
    name: str, net: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.quantization.quality_for", lambda *_: pytest.fail("it was measured"))
    output = net.parent / name if name.startswith("q") else Path("/proc") / name
    assert run(["quantize", str(net), "--scheme", "auto", "-o", str(output)]) == 2
    assert "cannot be written: " in capsys.readouterr().err.splitlines()[-1]


def test_a_report_replaces_nothing_but_a_page_of_ours(net: Path, tmp_path: Path, capsys: Capture) -> None:
    thesis = net.with_name("thesis.tex")
    thesis.write_text("years of work")
    auto = {"scheme": "auto"}
    message = f"--report {thesis} is no page that edgekit wrote; --force will not replace it"
    assert message in refused(net, capsys, "--report", thesis, "--force", **auto)
    link = net.with_name("link.html")
    link.symlink_to("nowhere")
    assert f"--report {link} already exists" in refused(net, capsys, "--report", link, **auto)
    assert "--report and -o are both" in refused(net, capsys, "--report", net.with_name("q.bundle"), **auto)
    page = tmp_path / "page.html"
    command = ["quantize", str(net), "--scheme", "auto", "--for-size", "--time", "0", "--threads", "1", "--max-drop", "50"]
    command += ["--report", str(page), "--force", "-o", str(tmp_path / "r.bundle")]
    assert run(command) == 0
    assert run(command) == 0
    assert "<svg" in page.read_text()


def test_a_result_that_is_far_off_its_goldens_says_so(net: Path, tmp_path: Path, capsys: Capture) -> None:
    data = net.with_name("zeros.npz")
    np.savez(data, x=np.full((64, WIDTH), 1e-3, np.float32))
    command = ["quantize", str(net), "--scheme", "int8-static", "--data", str(data), "--for-size", "--threads", "1"]
    assert run([*command, "-o", str(tmp_path / "far.bundle")]) == 0
    assert "of their size, and were judged on the samples of zeros.npz, against fp32: is that like what" in " ".join(
        capsys.readouterr().out.split()
    )
    np.savez(data, x=np.random.default_rng(1).standard_normal((64, WIDTH)).astype(np.float32))
    assert run([*command, "-o", str(tmp_path / "near.bundle")]) == 0
    assert "of their size" not in capsys.readouterr().out
    assert verify_bundle(tmp_path / "near.bundle")


def test_outputs_whose_sizes_depend_on_values(tmp_path: Path, capsys: Capture) -> None:
    nodes = [
        *product().graph.node,
        helper.make_node("Greater", ["y", "zero"], ["g"]),
        helper.make_node("NonZero", ["g"], ["places"]),
    ]
    weights = {
        "w": np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32),
        "zero": np.zeros((), np.float32),
    }
    outputs = {"places": (TensorProto.INT64, [2, "found"])}
    net = save(make_model(nodes, weights, inputs={"x": SHAPE}, outputs=outputs), tmp_path / "net.onnx")
    assert "agreement drops by " in refused(net, capsys, "--for-size", scheme="int8-weights", code=1)
    command = ["quantize", str(net), "--scheme", "auto", "--for-size", "--threads", "1", "-o", str(tmp_path / "auto.bundle")]
    assert run(command) == 0
    assert verify_bundle(tmp_path / "auto.bundle")
