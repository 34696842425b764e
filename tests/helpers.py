"""Small models and bundles for tests, made without training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).resolve().parent.parent


def make_model(
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray[Any, Any]] | None = None,
    *,
    inputs: dict[str, tuple[int, list[Any]]] | None = None,
    outputs: dict[str, tuple[int, list[Any]]] | None = None,
    opset: int = 20,
) -> onnx.ModelProto:
    """A model from nodes. Inputs and outputs are name → (element type, shape)."""
    inputs = inputs or {"x": (TensorProto.FLOAT, ["batch", 4])}
    outputs = outputs or {"y": (TensorProto.FLOAT, ["batch", 3])}
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def gemm_model(seed: int = 0, **options: Any) -> onnx.ModelProto:
    """y = xW + b, (batch, 4) → (batch, 3)."""
    random = np.random.default_rng(seed)
    weights = {"W": random.standard_normal((4, 3)).astype(np.float32), "b": random.standard_normal(3).astype(np.float32)}
    return make_model([helper.make_node("Gemm", ["x", "W", "b"], ["y"], name="gemm")], weights, **options)


def save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, str(path))
    return path


def gemm_bundle(folder: Path) -> Path:
    """A real bundle around `gemm_model`."""
    from exporters.adopt import adopt

    return adopt(save(gemm_model(), folder / "gemm.onnx"), folder / "gemm.bundle").bundle.root


def edgekit(*arguments: object, cwd: Path | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "toolkit", *map(str, arguments)],
        cwd=cwd or ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
    )


def environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(ROOT)}


def leftovers(folder: Path) -> list[str]:
    """What an unfinished write left in `folder`."""
    return [entry.name for entry in folder.iterdir() if ".partial-" in entry.name]
