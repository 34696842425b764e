"""The command line as a user meets it: exit codes, one clear line, nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

import runtime
from runtime.bundle import Bundle
from toolkit.cli import run
from toolkit.commands import COMMANDS

from ..helpers import edgekit, gemm_model, leftovers, save

NETWORKS = Path(__file__).parents[1] / "exporters" / "user_networks.py"


def refused(capfd: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """Run a command that must fail with `code` and one line on stderr; returns the line."""
    assert run([str(argument) for argument in arguments]) == code
    errors = capfd.readouterr().err.strip()
    assert "Traceback" not in errors
    line = errors.splitlines()[-1]
    assert line.startswith("error: ")
    assert sum(text.startswith("error: ") for text in errors.splitlines()) == 1
    return line


def test_every_verb_of_the_design_is_there() -> None:
    verbs = {command.name for command in COMMANDS}
    steps = {"list", "train", "export", "check", "optimize", "quantize", "wrap", "verify", "evaluate", "bench", "run", "deploy"}
    assert verbs == steps


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_shows_a_real_example_within_80_columns(command, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([command.name, "--help"]) == 0
    text = capfd.readouterr().out
    assert f"edgekit {command.name}" in text
    assert "Example" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_list_as_json_has_the_promised_fields(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "architectures", "--json"]) == 0
    entries = json.loads(capfd.readouterr().out)
    assert {"name", "task", "parameters", "description"} <= set(entries[0])
    assert {entry["name"]: entry["parameters"] for entry in entries}["lenet"] == 61_706
    assert run(["list"]) == 0
    text = capfd.readouterr().out
    for word in ("lenet", "diabetes", "int8-static", "frozen-axes"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "lennet"], "did you mean 'lenet'"),
        (["train", "lenet", "--set", "epoch=3"], "did you mean"),
        (
            ["train", "lenet", "--set", "epochs=three"],
            "'epochs' is 'three', expected a whole number|'training.epochs' is 'three'",
        ),
        (["train", "lenet", "--set", "epochs"], "write --set key=value"),
        (["train", "lenet", "--set", "network.image_size=5"], "at least 16 pixels"),
        (["train", "lenet", "--set", "data=3"], "is a section"),
        (["train", "mlp", "--data", "nowhere.csv"], "there is no nowhere.csv"),
        (["train", "lenet", "--data", "nowhere.csv"], "takes images, but nowhere.csv is a table"),
        (["train"], "name a recipe"),
        (["export", "lennet"], "did you mean 'lenet'"),
        (["export", "nowhere.onnx"], "there is no file nowhere.onnx"),
        (["export", "lenet", "--opset", "99"], "99 is not in the range"),
        (["export", "mlp", "--set", "width=3"], "known: dropout, hidden"),
        (["export", f"{NETWORKS}:raises"], "raised KeyError"),
        (["optimize", "nowhere.bundle"], "no bundle at nowhere.bundle"),
        (["quantize", "nowhere.bundle", "--scheme", "int8-static"], "no bundle at"),
        (["deploy", "lenet", "--scheme", "int9"], "no scheme named 'int9'"),
        (["deploy", "lennet"], "did you mean 'lenet'"),
    ],
)
def test_bad_input_gets_one_line_and_exit_2_and_writes_nothing(
    arguments: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import re

    line = refused(capfd, 2, *arguments, "-o", tmp_path / "out")
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "nowhere.bundle"], "no bundle at nowhere.bundle"),
        (["evaluate", "nowhere.bundle"], "no bundle at"),
        (["bench", "nowhere.bundle"], "no bundle at"),
        (["run", "nowhere.bundle", "--input", "x.csv"], "no bundle at"),
        (["check", "nowhere.onnx"], "there is no file nowhere.onnx"),
        (["lisst"], "No such command 'lisst'"),
        (["list", "networks"], "is not one of"),
        (["verify"], "Missing argument 'BUNDLE'; see: edgekit verify --help"),
    ],
)
def test_bad_input_to_the_reading_verbs(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capfd, 2, *arguments)


@pytest.mark.parametrize("content", [b"", b"garbage", None], ids=["empty", "garbage", "truncated"])
@pytest.mark.parametrize("verb", ["export", "check", "quantize"])
def test_an_unreadable_onnx_file(verb: str, content: bytes | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(gemm_model().SerializeToString()[:100] if content is None else content)
    extra = {"export": ["-o", tmp_path / "out"], "check": [], "quantize": ["-o", tmp_path / "out", "--scheme", "fp16"]}[verb]
    assert "not a readable ONNX model" in refused(capfd, 2, verb, path, *extra)
    assert not (tmp_path / "out").exists()


def test_missing_external_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    onnx.save(gemm_model(), str(tmp_path / "m.onnx"), save_as_external_data=True, location="w.data", size_threshold=0)
    (tmp_path / "w.data").unlink()
    assert "'w.data'" in refused(capfd, 2, "export", tmp_path / "m.onnx", "-o", tmp_path / "out")
    assert run(["check", str(tmp_path / "m.onnx")]) == 1
    assert "w.data: the weights file is missing" in capfd.readouterr().out


def test_an_existing_output_is_never_touched(bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    for arguments in (
        ["train", "softmax"],
        ["export", "softmax"],
        ["optimize", bundle],
        ["quantize", bundle, "--scheme", "fp16"],
        ["deploy", "softmax"],
    ):
        assert "already exists" in refused(capfd, 2, *arguments, "-o", target)
        assert "was not written by edgekit" in refused(capfd, 2, *arguments, "-o", target, "--force")
    assert [path.name for path in target.iterdir()] == ["mine.txt"]


def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk of this machine cannot be filled safely: every write to a bundle's file fails as on a full one."""

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert "the disk is full" in refused(capfd, 2, "export", "softmax", "-o", tmp_path / "s.bundle")
    monkeypatch.setattr(os, "fsync", lambda descriptor: full(Path("x"), b""))
    assert "the disk is full" in refused(capfd, 2, "train", "softmax", "-o", tmp_path / "run")
    assert not (tmp_path / "s.bundle").exists()
    assert leftovers(tmp_path) == []


def test_a_folder_that_may_not_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    line = refused(capfd, 2, "export", "softmax", "-o", tmp_path / "file" / "x.bundle")
    assert "is a file; choose another -o" in line


def test_an_error_of_ours_is_called_a_bug_and_debug_shows_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from exporters import check as module

    def broken(path: Path) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(module, "_graphs", broken)
    assert "this is a bug in edgekit, ZeroDivisionError: oops" in refused(capfd, 2, "check", "x.onnx")
    assert run(["check", "x.onnx", "--debug"]) == 2
    assert "Traceback" in capfd.readouterr().err


def test_check_says_what_is_wrong_and_exits_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = save(gemm_model(), tmp_path / "good.onnx")
    assert run(["check", str(good)]) == 0
    assert "0 errors, 0 warnings" in capfd.readouterr().out
    model = gemm_model()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "spare"))
    warned = save(model, tmp_path / "warned.onnx")
    assert run(["check", str(warned)]) == 0
    assert run(["check", str(warned), "--fail-on", "warning"]) == 1
    assert "fix: run: edgekit optimize" in capfd.readouterr().out
    assert run(["check", str(warned), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["findings"][0]["rule"] == "unused"


def test_evaluate_run_and_the_users_own_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 2))
    rows = "\n".join(f"{a:.4f},{b:.4f},{'up' if a + b > 0 else 'down'},note{i}" for i, (a, b) in enumerate(x))
    data = tmp_path / "d.csv"
    data.write_text(f"a,b,way,remark\n{rows}\n")
    train = [
        "train",
        "mlp",
        "--data",
        data,
        "--set",
        "data.target=way",
        "--set",
        "data.columns=a,b",
        "--set",
        "epochs=30",
        "--set",
        "network.hidden=8",
        "--set",
        "learning_rate=0.02",
    ]
    assert run([*map(str, train), "-o", str(tmp_path / "run")]) == 0
    assert run(["export", str(tmp_path / "run"), "-o", str(tmp_path / "m.bundle")]) == 0
    capfd.readouterr()
    assert "pass it, or other labelled data, with --data" in refused(capfd, 2, "evaluate", tmp_path / "m.bundle")
    assert run(["evaluate", str(tmp_path / "m.bundle"), "--data", str(data), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["data"] == "the test part of d.csv, 40 rows"
    assert report["metrics"]["accuracy"] > 85
    other = tmp_path / "other.csv"
    other.write_text("b,a,way\n3,3,up\n-3,-3,down\n-1,5,up\n")
    assert run(["evaluate", str(tmp_path / "m.bundle"), "--data", str(other), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["rows"] == 3
    other.write_text("b,a,way\n3,3,up\n-3,-3,sideways\n")
    assert "class 'sideways', which the network does not know; it knows: down, up" in refused(
        capfd, 2, "evaluate", tmp_path / "m.bundle", "--data", other
    )
    fresh = tmp_path / "fresh.csv"
    fresh.write_text("remark,b,a\nx,4,4\ny,-4,-4\n")
    assert run(["run", str(tmp_path / "m.bundle"), "--input", str(fresh)]) == 0
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == ["up", "down"]
    fresh.write_text("remark,b\nx,4\n")
    assert "no column 'a'" in refused(capfd, 2, "run", tmp_path / "m.bundle", "--input", fresh)
    (tmp_path / "pic.png").write_bytes(b"x")
    assert "does not take an image" in refused(capfd, 2, "run", tmp_path / "m.bundle", "--input", tmp_path / "pic.png")
    manifest = (tmp_path / "m.bundle" / "manifest.json").read_text()
    assert str(tmp_path) not in manifest, "a bundle must not carry a path of the machine it was made on"


def test_run_on_images_arrays_and_wrong_files(
    exported: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    lenet = exported("lenet")
    Image.fromarray((digits.images[0] * 255 / 16).astype(np.uint8)).save(tmp_path / "zero.png")
    assert run(["run", str(lenet), "--input", str(tmp_path / "zero.png")]) == 0
    assert capfd.readouterr().out.startswith("0  (")
    np.savez(tmp_path / "many.npz", inputs=digits.images[:5])
    assert run(["run", str(lenet), "--input", str(tmp_path / "many.npz"), "--json"]) == 0
    labels = [entry["label"] for entry in json.loads(capfd.readouterr().out)]
    assert labels == list(runtime.load(lenet).predict(digits.images[:5]).labels or ())
    assert sum(given == right for given, right in zip(labels, "01234", strict=True)) >= 4  # training differs a little by CPU
    np.save(tmp_path / "one.npy", digits.images[7])
    assert run(["run", str(lenet), "--input", str(tmp_path / "one.npy")]) == 0
    assert run(["run", str(lenet), "--input", str(tmp_path / "many.npz"), "-o", str(tmp_path / "out.npz")]) == 0
    assert np.load(tmp_path / "out.npz")["logits"].shape == (5, 10)
    capfd.readouterr()
    assert "already exists" in refused(capfd, 2, "run", lenet, "--input", tmp_path / "many.npz", "-o", tmp_path / "out.npz")
    for name, content, message in [
        ("bad.png", b"not an image", "not an image"),
        ("bad.npz", b"not an archive", "cannot be read as .npz"),
        ("bad.npy", b"not an array", "cannot be read as .npy"),
        ("bad.txt", b"what", "not of a known kind"),
        ("bad.csv", b"a,b\n1,2\n", "does not take columns"),
    ]:
        (tmp_path / name).write_bytes(content)
        assert message in refused(capfd, 2, "run", lenet, "--input", tmp_path / name)
    np.save(tmp_path / "huge.npy", np.zeros((3, 100, 100)))
    assert "expected one sample of" in refused(capfd, 2, "run", lenet, "--input", tmp_path / "huge.npy")
    assert "there is no file" in refused(capfd, 2, "run", lenet, "--input", tmp_path / "none.png")


def test_the_users_own_network_from_file_to_quantized_and_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))\n"
        "    return net, (torch.randn(4, 64),)\n"
    )
    (tmp_path / "my_model.py").write_text(code)
    assert run(["export", f"{tmp_path}/my_model.py:build", "-o", str(tmp_path / "my.bundle")]) == 0
    assert "sizes tried" in capfd.readouterr().out
    assert (
        run(
            [
                "quantize",
                str(tmp_path / "my.bundle"),
                "--scheme",
                "int8-dynamic",
                "--for-size",
                "-o",
                str(tmp_path / "q.bundle"),
            ]
        )
        == 0
    )
    assert "x0.2" in capfd.readouterr().out
    assert "pass --data" in refused(
        capfd, 2, "quantize", tmp_path / "my.bundle", "--scheme", "int8-static", "-o", tmp_path / "s.bundle"
    )
    np.savez(tmp_path / "x.npz", input=np.random.default_rng(0).standard_normal((100, 64)))
    static = [
        "quantize",
        tmp_path / "my.bundle",
        "--scheme",
        "int8-static",
        "--for-size",
        "--data",
        tmp_path / "x.npz",
        "-o",
        tmp_path / "s.bundle",
        "--json",
    ]
    assert run([str(argument) for argument in static]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["kept"] is True
    assert report["size_ratio"] < 0.35
    assert run(["run", str(tmp_path / "s.bundle"), "--input", str(tmp_path / "x.npz")]) == 0
    assert "[100, 10]" in capfd.readouterr().out
    assert run(["verify", str(tmp_path / "s.bundle"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["passed"] is True
    assert "has no metric" in refused(capfd, 2, "evaluate", tmp_path / "s.bundle")
    assert "--vs my_model.py:build" in refused(capfd, 2, "bench", tmp_path / "my.bundle", "--vs", "torch")
    assert (
        run(
            [
                "bench",
                str(tmp_path / "my.bundle"),
                "--vs",
                f"{tmp_path}/my_model.py:build",
                "--rounds",
                "2",
                "--launches",
                "1",
                "--batch",
                "2",
                "--json",
            ]
        )
        == 0
    )
    assert [item["variant"] for item in json.loads(capfd.readouterr().out)["timings"]] == ["my", "torch"]


def test_classes_are_numbers_where_a_network_has_no_labels(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["export", f"{NETWORKS}:four_classes", "-o", str(tmp_path / "c.bundle")]) == 0
    classes = np.array([0, 2, 3] * 5)
    np.savez(tmp_path / "d.npz", inputs=np.eye(4)[classes], targets=classes)
    capfd.readouterr()
    assert run(["evaluate", str(tmp_path / "c.bundle"), "--data", str(tmp_path / "d.npz"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["metrics"]["accuracy"] == 100
    np.savez(tmp_path / "e.npz", inputs=np.eye(4)[classes], targets=classes + 4)
    assert "the class '4', which the network does not know" in refused(
        capfd, 2, "evaluate", tmp_path / "c.bundle", "--data", tmp_path / "e.npz"
    )


def test_a_refused_quantization_prints_its_figures_and_exits_1(
    tmp_path: Path, exported: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "quantize",
        exported("mlp"),
        "--scheme",
        "int8-dynamic",
        "--max-drop",
        "0",
        "--for-size",
        "-o",
        tmp_path / "q.bundle",
        "--json",
    ]
    code = run([str(argument) for argument in arguments])
    report = json.loads(capfd.readouterr().out)
    assert code == (0 if report["drop"] <= 0 else 1)
    assert (tmp_path / "q.bundle").exists() == report["kept"] == (code == 0)
    line = refused(capfd, 1, "quantize", exported("softmax"), "--scheme", "int8-static", "-o", tmp_path / "s.bundle")
    assert "640 weights are too few" in line
    assert not (tmp_path / "s.bundle").exists()


def test_bench_prints_tables_that_fit_a_terminal(exported: Callable[[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    path = str(exported("softmax"))
    assert (
        run(["bench", path, path, "--vs", "torch", "--batch", "1", "--rounds", "6", "--launches", "1", "--threads", "1"]) == 0
    )
    text = capfd.readouterr().out
    assert "softmax#2" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "95 % interval" in text
    assert "cold start" in text
    assert "onnxruntime" in text
    assert Bundle.open(path).manifest.lineage[0]["source"]["architecture"] == "softmax"


def test_output_cut_off_by_its_reader_is_no_error() -> None:
    import subprocess

    from ..helpers import ROOT, environment

    command = f"{sys.executable} -m toolkit list | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, env=environment())
    assert result.returncode == 0
    assert "Traceback" not in result.stderr


def test_version_and_no_command() -> None:
    assert "0.1.0" in edgekit("--version").stdout
    nothing = edgekit()
    assert nothing.returncode in (0, 2)
    assert "Usage" in nothing.stdout + nothing.stderr
