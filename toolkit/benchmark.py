"""Benchmark variants for the command line: bundles, and PyTorch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from architectures.catalog import CATALOG, find
from architectures.run_directory import Run, is_run
from runtime.bench import DEFAULT_PAST, BenchReport, bundle_variant
from runtime.bench_worker import Variant
from runtime.bundle import DECODER, Bundle
from runtime.errors import OptionError
from runtime.feeds import batch_axis_of, natural_batch
from runtime.statistics import Estimate

from .console import size_text, table, time_text

TORCH = "torch"


def bundle_variants(
    paths: tuple[str, ...], *, device: str, threads: int, graph: str | None = None, past: int = DEFAULT_PAST
) -> list[Variant]:
    """One variant a bundle, named by its folder; folders of the same name get a number."""
    names: list[str] = []
    for path in paths:
        name = Path(path).resolve().name.removesuffix(".bundle")
        names.append(name if name not in names else f"{name}#{len(names) + 1}")
    return [
        bundle_variant(path, name=name, device=device, threads=threads, graph=graph, past=past)
        for path, name in zip(paths, names, strict=True)
    ]


def default_batches(paths: tuple[str, ...]) -> tuple[int, ...]:
    """1, 8 and 32, or the only batch that a graph with fixed sizes takes."""
    graphs = [Bundle.open(path).manifest.graphs for path in paths]
    signatures = [of_bundle[DECODER if DECODER in of_bundle else next(iter(of_bundle))].signature for of_bundle in graphs]
    fixed = [natural_batch(signature) for signature in signatures if batch_axis_of(signature) is None]
    return (fixed[0],) if fixed else (1, 8, 32)


def torch_variant(bundle_path: str, versus: str, *, threads: int) -> Variant:
    """PyTorch: "torch" is the bundle's own architecture; anything else is a source as for export."""
    if versus != TORCH:
        name = Run.open(versus).architecture if is_run(versus) else versus
        if name in CATALOG and CATALOG[name].takes == ("tokens",):
            raise OptionError(f"--vs times networks on images and columns, and {versus} takes text; compare bundles")
        return Variant(TORCH, "toolkit.torch_worker", {"source": versus, "threads": threads})
    manifest = Bundle.open(bundle_path).manifest
    source: Any = manifest.lineage[0]["source"]
    if source["kind"] not in ("run", "architecture"):
        place = source.get("reference") or source.get("file")
        hint = f"pass it: --vs {place}" if source["kind"] == "function" else "an .onnx file has no PyTorch form"
        raise OptionError(f"{bundle_path} was made from {place}, not from the catalogue; {hint}")
    if find(source["architecture"]).takes == ("tokens",):
        raise OptionError(f"--vs torch times networks on images and columns, and {bundle_path} takes text; compare bundles")
    request = {
        "architecture": source["architecture"],
        "config": source["config"],
        "preprocessing": manifest.preprocessing,
        "threads": threads,
    }
    return Variant(TORCH, "toolkit.torch_worker", request)


def bench_table(report: BenchReport) -> str:
    """Latency by batch, then what each variant costs before its first answer, then the machine."""
    rows = []
    for timing in report.timings:
        latency = timing.latency
        interval = interval_text(latency)
        ratio = "1" if timing.ratio is None else ratio_text(timing.ratio)
        rows.append(
            [timing.variant, str(timing.batch), time_text(latency.median), interval, f"{timing.throughput:,.0f}", ratio]
        )
    first = table(["variant", "batch", "median", "95 % interval", "rows/s", "ratio"], rows)
    tails = [
        [
            timing.variant,
            str(timing.batch),
            time_text(timing.spread),
            " ".join(f"{name} {time_text(value)}" for name, value in timing.percentiles.items()) or "too few calls",
        ]
        for timing in report.timings
    ]
    second = table(["variant", "batch", "quartile range", "percentiles"], tails)
    costs = [
        [
            item.variant,
            item.device,
            "–" if item.file_bytes is None else size_text(item.file_bytes),
            f"{item.load_ms:.0f} ms",
            f"{item.cold_start_ms:.0f} ms",
            size_text(item.peak_bytes),
            size_text(item.model_bytes),
        ]
        for item in report.footprints
    ]
    third = table(["variant", "device", "file", "load", "cold start", "memory", "of it model"], costs)
    machine = report.machine
    limit = f", cgroup limit {machine['cgroup_cpus']:g}" if machine["cgroup_cpus"] else ""
    governor = f", governor {machine['governor']}" if machine["governor"] else ""
    warned = f"\nwarning: {report.warning}" if report.warning else ""
    about = (
        f"{machine['cpu']}, {machine['cores']} cores{limit}{governor}\n"
        f"{report.threads} threads, onnxruntime {machine['onnxruntime']}, numpy {machine['numpy']}, "
        f"Python {machine['python']}, {machine['system']}"
    )
    return f"{first}\n\n{second}\n\n{third}\n\n{about}\ntimed on {report.footprints[0].inputs}{warned}"


def interval_text(latency: Estimate) -> str:
    """Both ends in one unit: "63.7–115 µs"."""
    if latency.low is None or latency.high is None:
        return "too few rounds"
    scale, unit = (1.0, "µs") if latency.high < 1000 else (1000.0, "ms")
    return f"{latency.low / scale:.3g}–{latency.high / scale:.3g} {unit}"


def ratio_text(ratio: Estimate) -> str:
    return f"{ratio.median:.2f}" if ratio.low is None else f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
