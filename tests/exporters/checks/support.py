"""Models and bundles for the tests of the lint rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from exporters.check import check
from exporters.finding import Finding
from exporters.graph import signature_of
from runtime.bundle import GoldenEntry, GraphEntry, Manifest, Tolerance, pack_golden, write_bundle
from runtime.session import Session
from runtime.signature import StateSpec

from ...helpers import save

FLOAT, HALF, DOUBLE, INT64, INT32 = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.DOUBLE,
    TensorProto.INT64,
    TensorProto.INT32,
)
INT8, UINT8 = TensorProto.INT8, TensorProto.UINT8


def findings(source: onnx.ModelProto | Path, folder: Path, rule: str, target: str = "cpu") -> list[Finding]:
    """What `rule` says of a model or a bundle."""
    path = save(source, folder / "m.onnx") if isinstance(source, onnx.ModelProto) else source
    return [finding for finding in check(path, target).findings if finding.rule == rule]


def severities(found: list[Finding]) -> list[str]:
    return [finding.severity for finding in found]


def weights(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bundle_of(
    folder: Path,
    graphs: Mapping[str, onnx.ModelProto],
    states: Mapping[str, tuple[StateSpec, ...]] | None = None,
    feeds: Mapping[str, Mapping[str, np.ndarray[Any, Any]]] | None = None,
    shared: bool = False,
) -> Path:
    """A bundle of several graphs; their weights in each file, or `shared` in one external file."""
    root = folder / "parts"
    root.mkdir()
    entries, files, goldens, tolerance = {}, {}, [], {}
    for name, model in graphs.items():
        signature = signature_of(model, (states or {}).get(name, ()))
        where: dict[str, Any] = {"save_as_external_data": True, "location": "w.data", "size_threshold": 0} if shared else {}
        (root / "w.data").unlink(missing_ok=True)  # the writer appends: equal weights land at equal places of a fresh file
        onnx.save(model, str(root / f"{name}.onnx"), **where)
        entries[name] = GraphEntry(f"{name}.onnx", signature, ("w.data",) if shared else ())
        files[f"{name}.onnx"] = root / f"{name}.onnx"
        if name in (feeds or {}):
            outputs = Session(root / f"{name}.onnx", signature, device="cpu").run((feeds or {})[name])
            files[f"goldens/{name}.npz"] = pack_golden((feeds or {})[name], outputs)
            goldens.append(GoldenEntry(name, f"goldens/{name}.npz"))
            tolerance[name] = dict.fromkeys(outputs, Tolerance(1e-5, 1e-6, "a test"))
    if shared:
        files["w.data"] = root / "w.data"
    manifest = Manifest("test", "tensors", "fp32", entries, tuple(goldens), tolerance, {}, ())
    return write_bundle(folder / "test.bundle", manifest, files).root
