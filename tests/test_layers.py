"""The import rule: toolkit → exporters → architectures → runtime, and nothing heavy where it is not wanted."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from .helpers import ROOT, environment

PACKAGES = ["runtime", "architectures", "exporters", "toolkit"]  # each may import itself and those before it
RUNTIME_MAY_IMPORT = {"numpy", "onnxruntime", "runtime", *sys.stdlib_module_names}


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded in a fresh interpreter after running `code`."""
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment())
    return set(json.loads(result.stdout.splitlines()[-1]))


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_downwards_only(package: str) -> None:
    above = set(PACKAGES[PACKAGES.index(package) + 1 :])
    for path in (ROOT / package).rglob("*.py"):
        assert not imports_of(path) & above, f"{path.relative_to(ROOT)} imports upwards"


def test_runtime_source_imports_numpy_and_onnxruntime_only() -> None:
    for path in (ROOT / "runtime").rglob("*.py"):
        assert imports_of(path) <= RUNTIME_MAY_IMPORT, path.name


def test_importing_runtime_brings_in_nothing_heavy() -> None:
    everything = "import runtime; [getattr(runtime, name) for name in runtime.__all__]; import runtime.verify, runtime.bench"
    loaded = modules_after(everything)
    assert {"numpy", "onnxruntime"} <= loaded
    assert not loaded & {"torch", "onnx", "click", "toolkit", "architectures", "exporters"}


def test_errors_can_be_imported_without_onnxruntime() -> None:
    assert "onnxruntime" not in modules_after("import runtime.errors")


def test_help_of_every_command_imports_nothing_heavy() -> None:
    code = (
        "import sys, io, contextlib\n"
        "from toolkit.cli import run, cli\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    assert run(['--help']) == 0\n"
        "    for name in cli.commands: assert run([name, '--help']) == 0, name"
    )
    assert not modules_after(code) & {"numpy", "onnxruntime", "torch", "onnx", "jinja2", "sklearn", "safetensors"}


def test_public_names_of_runtime_are_pinned() -> None:
    import runtime

    assert sorted(runtime.__all__) == [
        "Bundle",
        "EdgekitError",
        "Filling",
        "Generation",
        "GraphSignature",
        "Model",
        "Options",
        "Prediction",
        "Score",
        "Session",
        "StateSpec",
        "TensorSpec",
        "Trie",
        "load",
    ]
    assert dir(runtime) == sorted(runtime.__all__)
