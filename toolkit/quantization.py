"""Quantizing what the user names: a bundle, or an .onnx file that is first adopted into one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from exporters.adopt import adopt
from exporters.quantize import Budget, QuantizeReport, quantize
from runtime.bundle import MANIFEST, Bundle
from runtime.files import refuse_existing

from .evaluation import quality_for


def quantize_path(
    path: str,
    output: str,
    *,
    scheme: str,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    data: str | None,
    max_drop: float | None,
    for_size: bool,
    batch: int | None,
    threads: int,
    force: bool,
    progress: Callable[[str], None],
) -> QuantizeReport:
    refuse_existing(Path(output), force=force, marker=MANIFEST)
    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
        if path.lower().endswith(".onnx"):
            bundle = adopt(path, Path(folder) / "adopted.bundle", progress=progress).bundle
        else:
            bundle = Bundle.open(path)
        quality, calibration = quality_for(bundle, data)
        return quantize(
            bundle,
            output,
            scheme=scheme,
            quality=quality,
            only=only,
            exclude=exclude,
            calibration=calibration,
            budget=Budget(max_drop, for_size),
            batch=batch,
            threads=threads,
            force=force,
            progress=progress,
        )
