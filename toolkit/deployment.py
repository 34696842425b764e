"""Everything in order — train, export, check, optimize, quantize, verify, evaluate, bench — and one report."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from architectures.catalog import CATALOG
from architectures.run_directory import is_run
from architectures.settings import parse_settings
from exporters.adopt import adopt
from exporters.check import CheckReport, check
from exporters.export import ExportReport, export
from exporters.optimize import OptimizeReport, optimize
from exporters.quantize import Budget, MeasuredRefusal, QuantizeReport, quantize
from exporters.quantizers import SCHEMES
from exporters.source import Exportable, find_source
from runtime.bench import BenchReport, bench, bundle_variant
from runtime.bundle import Bundle
from runtime.errors import OptionError, QuantizationRefused, UnknownName
from runtime.files import new_directory, refuse_existing
from runtime.statistics import Estimate
from runtime.verify import ParityReport, verify_bundle

from .benchmark import TORCH, ratio_text
from .console import progress_bar, size_text, table, time_text
from .evaluation import BundleData, data_for, predict_all, quality_for
from .training import loop
from .training.recipe import load_recipe, recipe_names

REPORT_DATA = "report.json"
REPORT_PAGE = "report.html"
_FP32 = "fp32"
_SAMPLES = 5

Progress = Callable[[str], None]


@dataclass
class VariantResult:
    """A row of the report: PyTorch, the exported network, or an attempt at making it smaller."""

    name: str
    verdict: str  # "reference", "kept" or "refused"
    bundle: str | None = None  # folder inside the report's
    bytes: int | None = None
    metric: float | None = None
    latency: Estimate | None = None
    ratio: Estimate | None = None  # to fp32
    reason: str = ""
    verified: bool | None = None


@dataclass
class DeployReport:
    name: str
    task: str
    source: str
    metric: str
    unit: str
    metric_data: str
    variants: list[VariantResult]
    winner: str
    same_answers: tuple[int, int] | None  # rows where fp32 answers as PyTorch, of all test rows
    export: dict[str, Any]
    check: dict[str, Any]
    optimize: dict[str, Any]
    bench: dict[str, Any]
    parity: dict[str, Any]
    lineage: list[Any]
    has_sample: bool
    input_names: list[str]
    training: dict[str, Any] | None
    attempts: list[dict[str, Any]] = field(default_factory=list)

    def variant(self, name: str) -> VariantResult:
        return next(item for item in self.variants if item.name == name)

    def to_json(self) -> dict[str, Any]:
        variants = [
            vars(item) | {"latency": item.latency and vars(item.latency), "ratio": item.ratio and vars(item.ratio)}
            for item in self.variants
        ]
        return vars(self) | {"variants": variants}


def deploy(
    source: str,
    output: str,
    *,
    schemes: tuple[str, ...] = (),
    max_drop: float | None = None,
    data: str | None = None,
    settings: tuple[str, ...] = (),
    threads: int,
    force: bool = False,
    progress: Progress = lambda step: None,
) -> DeployReport:
    for scheme in schemes:
        if scheme not in SCHEMES:
            raise UnknownName.of("scheme", scheme, SCHEMES)
    refuse_existing(Path(output), force=force, marker=REPORT_DATA)
    with new_directory(Path(output), force=force, marker=REPORT_DATA) as folder:
        network, exported = _export(source, folder, data, settings, progress)
        bundle = exported.bundle
        progress("checking the graph")
        checked = check(bundle.root)
        progress("optimizing the graph")
        optimized = optimize(bundle, folder / "optimized.bundle")
        if optimized.changed:
            bundle = Bundle.open(folder / "optimized.bundle")
        else:
            _remove(folder / "optimized.bundle")
        variants, attempts = _quantize_all(bundle, folder, schemes, max_drop, data, threads, progress)
        report = _measure(source, network, exported, bundle, checked, optimized, variants, data, folder, threads, progress)
        report.attempts = [attempt.to_json() for attempt in attempts]
        progress("writing the report")
        _write_report(report, folder, output)
    return report


def summary(report: DeployReport, output: str) -> str:
    """The short table at the end, and where to go from here."""
    rows = []
    for item in report.variants:
        metric = "–" if item.metric is None else f"{item.metric:.2f} {report.unit}".strip()
        ratio = "1" if item.name == _FP32 else ("–" if item.ratio is None else ratio_text(item.ratio))
        latency = "–" if item.latency is None else time_text(item.latency.median)
        size = "–" if item.bytes is None else size_text(item.bytes)
        rows.append([item.name, metric, size, latency, ratio, item.verdict])
    lines = ["", table(["variant", report.metric, "size", "latency", "ratio", "verdict"], rows), ""]
    lines += [f"refused {item.name}: {_short(item.reason)}" for item in report.variants if item.verdict == "refused"]
    if report.same_answers:
        lines.append(f"fp32 answers as PyTorch on {report.same_answers[0]} of {report.same_answers[1]} test rows")
    winner = report.variant(report.winner)
    lines.append(f"smallest that lost nothing that matters: {report.winner}")
    lines.append(f"bundle: {Path(output) / str(winner.bundle)}")
    if report.has_sample:
        lines.append(f"run it: edgekit run {Path(output) / str(winner.bundle)} --input {Path(output) / 'sample.npz'}")
    lines.append(f"report: {Path(output) / REPORT_PAGE}")
    return "\n".join(lines)


def _export(
    source: str, folder: Path, data: str | None, settings: tuple[str, ...], progress: Progress
) -> tuple[Exportable | None, ExportReport]:
    """Train if `source` is a recipe, then export."""
    target = folder / f"{_FP32}.bundle"
    if source.lower().endswith(".onnx"):
        return None, adopt(source, target, progress=progress)
    is_recipe = source.endswith(".toml") or source in recipe_names() or source in CATALOG
    if is_recipe and not is_run(source):
        recipe = load_recipe(source).with_settings(parse_settings(settings) | ({"data.path": data} if data else {}))
        run, parts = loop.start(recipe, folder / "run")
        progress(f"training {run.architecture} on {run.data['name']} ({len(parts.train)} rows)")
        with progress_bar("epoch") as update:
            loop.train(
                run,
                parts,
                folder / "run",
                lambda epoch: update(epoch.number, epoch.total, f"loss {epoch.loss:.4f}  {epoch.metric} {epoch.value:.2f}"),
            )
        network = find_source(str(folder / "run"))
    else:
        if settings:
            raise OptionError(f"--set changes a recipe; {source} is already built")
        network = find_source(source)
    return network, export(network, target, progress=progress)


def _quantize_all(
    bundle: Bundle,
    folder: Path,
    schemes: tuple[str, ...],
    max_drop: float | None,
    data: str | None,
    threads: int,
    progress: Progress,
) -> tuple[list[VariantResult], list[QuantizeReport]]:
    """Every scheme on the whole graph; where that is refused, on one operator type alone, the heaviest first."""
    quality, calibration = quality_for(bundle, data)
    chosen = schemes or tuple(
        name for name, scheme in SCHEMES.items() if calibration is not None or not scheme.needs_calibration
    )
    results: list[VariantResult] = []
    attempts: list[QuantizeReport] = []

    def attempt(scheme: str, only: tuple[str, ...]) -> tuple[bool, QuantizeReport | None]:
        name = scheme + (f" {'+'.join(only)}" if only else "")
        target = folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.bundle"
        try:
            report = quantize(
                bundle,
                target,
                scheme=scheme,
                only=only,
                quality=quality,
                calibration=calibration,
                budget=Budget(max_drop),
                threads=threads,
                progress=lambda step: progress(f"{name}: {step}"),
            )
        except MeasuredRefusal as refusal:
            attempts.append(refusal.report)
            results.append(_variant(name, refusal.report, "refused", reason="; ".join(refusal.report.refusals)))
            return False, refusal.report
        except QuantizationRefused as refusal:
            results.append(VariantResult(name, "refused", reason=str(refusal)))
            return False, None
        attempts.append(report)
        results.append(_variant(name, report, "kept", bundle=target.name))
        return True, report

    for scheme in chosen:
        kept, report = attempt(scheme, ())
        if kept or report is None or scheme == "fp16":
            continue
        for operator in _operators_by_weight(report):
            if attempt(scheme, (operator,))[0]:
                break
    return results, attempts


def _variant(name: str, report: QuantizeReport, verdict: str, *, bundle: str | None = None, reason: str = "") -> VariantResult:
    return VariantResult(name, verdict, bundle, report.bytes_after, report.metric_after, None, report.latency_ratio, reason)


def _operators_by_weight(report: QuantizeReport) -> list[str]:
    """The quantized operator types, heaviest first; none if there is only one, which has just been tried."""
    totals: dict[str, int] = {}
    for node in report.nodes:
        if node.quantized:
            totals[node.operator] = totals.get(node.operator, 0) + node.weights
    return sorted(totals, key=lambda operator: -totals[operator]) if len(totals) > 1 else []


def _measure(
    source: str,
    network: Exportable | None,
    exported: ExportReport,
    bundle: Bundle,
    checked: CheckReport,
    optimized: OptimizeReport,
    variants: list[VariantResult],
    data: str | None,
    folder: Path,
    threads: int,
    progress: Progress,
) -> DeployReport:
    quality, _ = quality_for(bundle, data)
    found = data_for(bundle, data)
    fp32 = VariantResult(_FP32, "reference", bundle.root.name, bundle.graph_bytes, quality.measure(bundle))
    rows = [fp32, *variants]
    torch_row, same = _torch_row(network, bundle, found, quality.metric.compute)
    if torch_row:
        rows.insert(0, torch_row)
    kept = [item for item in rows if item.bundle]
    progress("replaying the goldens")
    parity: dict[str, ParityReport] = {item.name: verify_bundle(folder / str(item.bundle)) for item in kept}
    for item in kept:
        item.verified = bool(parity[item.name])
    timings = _bench(source, network, kept, folder, threads, progress)
    for item in rows:
        if item.name == TORCH or item in kept:
            timing = timings.timing(item.name, 1)
            item.latency, item.ratio = timing.latency, timing.ratio
        elif item.ratio is not None:  # refused: timed against fp32 in its own run, shown on the scale of this one
            base = timings.timing(_FP32, 1).latency.median
            item.latency = Estimate(
                base * item.ratio.median,
                base * (item.ratio.low or item.ratio.median),
                base * (item.ratio.high or item.ratio.median),
            )
    winner = min((item for item in kept if item.verified), key=lambda item: item.bytes or 0)
    has_sample = _write_sample(found, folder)
    return DeployReport(
        name=bundle.manifest.name,
        task=bundle.manifest.task,
        source=source,
        metric=quality.metric.name,
        unit=quality.metric.unit,
        metric_data=quality.data,
        variants=rows,
        winner=winner.name,
        same_answers=same,
        export=exported.to_json(),
        check=checked.to_json(),
        optimize=optimized.to_json(),
        bench=timings.to_json(),
        parity={name: report.to_json() for name, report in parity.items()},
        lineage=list(Bundle.open(folder / str(winner.bundle)).manifest.lineage),
        has_sample=has_sample,
        input_names=[spec.name for spec in bundle.graph()[1].signature.inputs],
        training=_training(network),
    )


def _training(network: Exportable | None) -> dict[str, Any] | None:
    if network is None or network.source["kind"] != "run":
        return None
    metrics = network.source["metrics"]
    return {
        "architecture": network.source["architecture"],
        "data": (network.data or {})["name"],
        **{key: metrics[key] for key in ("metric", "test", "epochs")},
    }


def _torch_row(
    network: Exportable | None, bundle: Bundle, found: BundleData | None, compute: Callable[[Any, Any], float]
) -> tuple[VariantResult | None, tuple[int, int] | None]:
    """PyTorch on the same test rows, and on how many of them the bundle gives the same answer."""
    if network is None:
        return None, None
    size = sum(tensor.numel() * tensor.element_size() for tensor in network.module.parameters())
    if found is None:
        return VariantResult(TORCH, "reference", None, size), None
    outputs = loop.predict(network.module, found.test)
    same = None
    if bundle.manifest.task == "classification":
        equal = outputs.argmax(axis=-1) == predict_all(bundle, found.test.inputs).argmax(axis=-1)
        same = (int(equal.sum()), len(equal))
    return VariantResult(TORCH, "reference", None, size, compute(outputs, found.test.targets)), same


def _bench(
    source: str, network: Exportable | None, kept: list[VariantResult], folder: Path, threads: int, progress: Progress
) -> BenchReport:
    from .benchmark import torch_variant

    progress("timing all variants against each other")
    variants = [bundle_variant(folder / str(item.bundle), name=item.name, threads=threads) for item in kept]
    if network is not None:
        versus = source if network.source["kind"] == "function" else TORCH
        variants.append(torch_variant(str(folder / str(kept[0].bundle)), versus, threads=threads))
    with progress_bar("round") as update:
        return bench(variants, batches=(1,), threads=threads, progress=update)


def _write_sample(found: BundleData | None, folder: Path) -> bool:
    """A few raw test rows, so that the report's command can be run as it is."""
    if found is None:
        return False
    buffer = io.BytesIO()
    np.savez(buffer, inputs=found.test.inputs[:_SAMPLES], targets=found.test.targets[:_SAMPLES])
    (folder / "sample.npz").write_bytes(buffer.getvalue())
    return True


def _write_report(report: DeployReport, folder: Path, output: str) -> None:
    from .report.page import render

    (folder / REPORT_DATA).write_text(json.dumps(report.to_json(), indent=1, default=str))
    (folder / REPORT_PAGE).write_text(render(report, Path(output)), encoding="utf-8")


def _remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path)


def _short(reason: str) -> str:
    return reason.split(";")[0].split(" (95")[0]
