"""A device has numpy and onnxruntime, and perhaps click: real installs in environments of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from .helpers import ROOT


def pip(python: Path, *arguments: str) -> None:
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        str(ROOT / "constraints.txt"),
        *arguments,
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def device(shared: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """An environment with numpy and onnxruntime only; returns its Python."""

    def make(folder: Path) -> None:
        venv.create(folder / "env", with_pip=True)
        pip(folder / "env" / "bin" / "python", "numpy", "onnxruntime")

    return shared("device", make) / "env" / "bin" / "python"


def call(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments], cwd=folder, capture_output=True, text=True, timeout=120, env={"PATH": "/usr/bin:/bin"}
    )


def installed(python: Path) -> set[str]:
    """Names of the distributions that an environment has."""
    listed = "import importlib.metadata as m; print(*{d.metadata['Name'].lower().replace('_', '-') for d in m.distributions()})"
    return set(call(python, python.parent, "-c", listed).stdout.split())


def needs_of(python: Path, *names: str) -> set[str]:
    """Distributions and all that they need, without their extras."""
    script = (
        "import importlib.metadata as m, re, sys\n"
        "found, todo = set(), sys.argv[1:]\n"
        "while todo:\n"
        "    name = todo.pop().lower().replace('_', '-')\n"
        "    if name in found: continue\n"
        "    found.add(name)\n"
        "    todo += [re.split(r'[^\\w.-]', text)[0] for text in m.requires(name) or () if 'extra ==' not in text]\n"
        "print(*found)"
    )
    result = call(python, python.parent, "-c", script, *names)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_the_runtime_folder_alone_replays_goldens(device: Path, bundle: Path, tmp_path: Path) -> None:
    alone = tmp_path / "device"
    shutil.copytree(ROOT / "runtime", alone / "runtime", ignore=shutil.ignore_patterns("__pycache__"))
    result = call(device, alone, "-m", "runtime", "verify", str(bundle))
    assert result.returncode == 0, result.stderr
    assert "verified: 3 of 3" in result.stdout
    flip_last_byte(bundle / "goldens" / "model-2.npz")
    result = call(device, alone, "-m", "runtime", "verify", str(bundle))
    assert result.returncode == 1
    assert "model-2.npz" in result.stderr


def test_edgekit_with_the_cpu_extra_alone(device: Path, bundle: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "demo", "build")
    shutil.copytree(ROOT, source, ignore=ignored)
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip(python, f"{source}[cpu]")
    absent = call(
        python, tmp_path, "-c", "import importlib.util as u; print([n for n in ('torch','onnx','jinja2') if u.find_spec(n)])"
    )
    assert absent.stdout.strip() == "[]"
    assert installed(python) <= {"edgekit", "click", "pip", "setuptools"} | needs_of(python, "numpy", "onnxruntime")
    command = str(environment / "bin" / "edgekit")
    result = subprocess.run([command, "verify", str(bundle)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "verified: 3 of 3" in result.stdout
    lacking = subprocess.run(
        [command, "train", "lenet", "-o", str(tmp_path / "run")], cwd=tmp_path, capture_output=True, text=True
    )
    assert lacking.returncode == 2
    assert "pip install 'edgekit[export]'" in lacking.stderr
    assert "Traceback" not in lacking.stderr
    flip_last_byte(bundle / "model.onnx")
    result = subprocess.run([command, "verify", str(bundle)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert "model.onnx" in result.stderr
