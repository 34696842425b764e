"""Quantizing what the user names, judged on the data that belongs to it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from architectures.settings import parse_settings
from exporters.quantize import Budget, QuantizeReport, quantize
from exporters.quantizers import SCHEMES, scheme_for
from exporters.search import AUTO, SearchReport, search
from runtime.bundle import MANIFEST, Bundle
from runtime.errors import OptionError, UnknownName
from runtime.files import refuse_existing, refuse_unwritable

from .evaluation import quality_for
from .opening import opened, refuse_text

_SIZES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_TIMES = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}


@dataclass(frozen=True)
class Limits:
    """What the user allows, as it was written: sizes and times are absolute ("2 MB", "5ms") or shares ("0.3x")."""

    max_drop: float | None = None
    max_size: str | None = None
    max_latency: str | None = None
    for_size: bool = False

    def budget(self, bundle: Bundle) -> Budget:
        size = limit_of("--max-size", self.max_size, _SIZES, lambda: bundle.graph_bytes)
        time = limit_of("--max-latency", self.max_latency, _TIMES, lambda: 1.0)
        is_share = (self.max_latency or "").strip().lower().endswith("x")
        return Budget(
            self.max_drop,
            self.for_size,
            None if size is None else int(size),
            max_us=None if is_share else time,
            max_ratio=time if is_share else None,
        )


def limit_of(option: str, text: str | None, units: Mapping[str, float], whole: Callable[[], float]) -> float | None:
    """ "2.5MB" → 2500000.0; "0.3x" → three tenths of the original's."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(\w+)\s*", text)
    number, unit = (float(found[1]), found[2].lower()) if found else (0.0, "")
    if number <= 0 or (unit != "x" and unit not in units):
        known = ", ".join(f"3{name}" for name in units)
        raise OptionError(f"{option} {text!r} is not understood; write a number with a unit ({known}) or a share such as 0.3x")
    limit = number * (whole() if unit == "x" else units[unit])
    if not isfinite(limit):
        raise OptionError(f"{option} is too large a number to be a limit; leave it out")
    return limit


def quantize_path(
    path: str,
    output: str,
    *,
    scheme: str,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    settings: tuple[str, ...],
    data: str | None,
    limits: Limits,
    seconds: float | None,
    batch: int | None,
    threads: int | None,
    force: bool,
    progress: Callable[[str], None],
) -> QuantizeReport | SearchReport:
    refuse_existing(Path(output), force=force, marker=MANIFEST)
    refuse_unwritable(Path(output))
    if scheme not in (AUTO, *SCHEMES):
        raise UnknownName.of("scheme", scheme, [*SCHEMES, AUTO])
    if scheme == AUTO and (only or exclude or settings):
        raise OptionError("--scheme auto chooses operators and settings itself; leave out --only, --exclude and --set")
    if scheme != AUTO and seconds is not None:
        raise OptionError(f"--time is for --scheme auto, and {scheme} takes as long as it takes; leave it out")
    with opened(path, progress) as bundle:
        if scheme != AUTO and not scheme_for(scheme, bundle.manifest).takes_text:
            on_text = ", ".join(name for name in SCHEMES if scheme_for(name, bundle.manifest).takes_text)
            refuse_text(bundle, scheme, f"use a scheme for text: {on_text}")
        quality, calibration = quality_for(bundle, data)
        quality = replace(quality, samples=_state_of(data))
        budget = limits.budget(bundle)
        common: dict[str, Any] = {
            "quality": quality,
            "calibration": calibration,
            "budget": budget,
            "batch": batch,
            "threads": threads,
        }
        if scheme == AUTO:
            return search(bundle, output, seconds=seconds, force=force, progress=progress, **common)
        chosen: dict[str, Any] = {"only": only, "exclude": exclude, "settings": parse_settings(settings)}
        return quantize(bundle, output, scheme=scheme, force=force, progress=progress, **chosen, **common)


def _state_of(data: str | None) -> str:
    """Changes when a file of the user's data does."""
    if data is None:
        return ""
    files = sorted(file for file in (Path(data), *Path(data).rglob("*")) if file.is_file())
    listed = "\n".join(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest()
