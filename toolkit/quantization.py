"""Quantizing what the user names, judged on the data that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from architectures.settings import parse_settings
from exporters.quantize import Budget, QuantizeReport, quantize
from exporters.quantizers import SCHEMES, scheme_for
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
    settings: tuple[str, ...],
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
        if scheme in SCHEMES and not scheme_for(scheme, bundle.manifest).takes_text:
            on_text = ", ".join(name for name in SCHEMES if scheme_for(name, bundle.manifest).takes_text)
            refuse_text(bundle, scheme, f"use a scheme for text: {on_text}")
        quality, calibration = quality_for(bundle, data)
        return quantize(
            bundle,
            output,
            scheme=scheme,
            quality=quality,
            only=only,
            exclude=exclude,
            settings=parse_settings(settings),
            calibration=calibration,
            budget=Budget(max_drop, for_size),
            batch=batch,
            threads=threads,
            force=force,
            progress=progress,
        )
