"""Quantizing what the user names, judged on the data that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from exporters.quantize import Budget, QuantizeReport, quantize
from runtime.bundle import MANIFEST
from runtime.files import refuse_existing

from .evaluation import quality_for
from .opening import opened, refuse_text


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
    with opened(path, progress) as bundle:
        refuse_text(bundle, "quantize")
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
