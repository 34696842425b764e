"""Everything in order — train, export, check, optimize, quantize, verify, evaluate, bench — and one report."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from architectures.catalog import CATALOG, find
from architectures.run_directory import Run, is_run
from architectures.settings import parse_settings
from exporters.adopt import adopt
from exporters.check import check
from exporters.export import ExportReport, export
from exporters.exportable import Exportable
from exporters.optimize import optimize
from exporters.quantize import Budget, MeasuredRefusal, Quality, QuantizeReport, quantize
from exporters.quantizers import SCHEMES
from exporters.quantizers.scheme import Calibration
from exporters.source import find_source
from runtime.bench import BenchReport, bench, bundle_variant
from runtime.bundle import Bundle
from runtime.errors import DataError, OptionError, QuantizationRefused, SourceError, UnknownName
from runtime.feeds import natural_batch
from runtime.files import new_directory, refuse_existing
from runtime.statistics import Estimate
from runtime.verify import verify_bundle

from .benchmark import TORCH, torch_variant
from .console import progress_bar
from .evaluation import BundleData, data_for, predict_all, quality_for
from .report.deploy_report import FP32, REPORT_DATA, REPORT_PAGE, SAMPLE, DeployReport, VariantResult
from .report.page import render
from .training import loop
from .training.recipe import load_recipe, recipe_names

_SAMPLES = 5
_USUAL_SCHEMES = ("int8-dynamic", "int8-static", "fp16")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Origin:
    """What was exported: the network in PyTorch (None for an .onnx file), the proof, and the data it belongs to."""

    network: Exportable | None
    report: ExportReport
    data: str | None


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
        origin = _export(source, folder, data, settings, progress)
        bundle = origin.report.bundle
        progress("checking the graph")
        checked = check(bundle.root)
        progress("optimizing the graph")
        optimized = optimize(bundle, folder / "optimized.bundle")
        if optimized.changed:
            bundle = Bundle.open(folder / "optimized.bundle")
        else:
            shutil.rmtree(folder / "optimized.bundle")
        quality, calibration = quality_for(bundle, origin.data)
        found = data_for(bundle, origin.data)
        fp32 = VariantResult(FP32, "reference", bundle.root.name, bundle.graph_bytes, quality.measure(bundle))
        torch_row, same = _torch_row(origin.network, bundle, found, quality)
        tries, attempts = _quantize_all(bundle, folder, schemes, Budget(max_drop), quality, calibration, threads, progress)
        rows = [*torch_row, fp32, *tries]
        progress("replaying the goldens")
        parity = {item.name: verify_bundle(folder / item.bundle) for item in rows if item.bundle}
        timings = _bench(source, origin.network, rows, folder, threads, progress)
        _fill_in(rows, parity, timings, natural_batch(bundle.graph()[1].signature))
        winner = min((item for item in rows if item.verified), key=lambda item: item.bytes or 0)
        progress("writing the report")
        report = DeployReport(
            name=bundle.manifest.name,
            task=bundle.manifest.task,
            source=Path(source).name if "/" in source else source,
            metric=quality.metric.name,
            unit=quality.metric.unit,
            metric_data=quality.data,
            input_names=[spec.name for spec in bundle.graph()[1].signature.inputs],
            training=_training(origin.network),
            variants=rows,
            winner=winner.name,
            same_answers=same,
            export=origin.report.to_json() | {"bundle": f"{FP32}.bundle"},
            check=checked.to_json() | {"subject": f"{FP32}.bundle"},
            optimize=optimized.to_json() | {"bundle": bundle.root.name},
            bench=timings.to_json(),
            parity={name: replayed.to_json() for name, replayed in parity.items()},
            lineage=list(Bundle.open(folder / str(winner.bundle)).manifest.lineage),
            has_sample=_write_sample(found, folder),
            attempts=[attempt.to_json() for attempt in attempts],
        )
        (folder / REPORT_DATA).write_text(json.dumps(report.to_json(), indent=1, default=str))
        (folder / REPORT_PAGE).write_text(render(report, Path(output)), encoding="utf-8")
    return report


def _export(source: str, folder: Path, data: str | None, settings: tuple[str, ...], progress: Progress) -> Origin:
    """Train if `source` is a recipe, then export."""
    target = folder / f"{FP32}.bundle"
    is_recipe = source.endswith(".toml") or source in recipe_names() or source in CATALOG
    if settings and (not is_recipe or is_run(source)):
        raise OptionError(f"--set changes a recipe; {source} is already built")
    if source.lower().endswith(".onnx"):
        return Origin(None, adopt(source, target, progress=progress), data)
    if is_recipe and not is_run(source):
        recipe = load_recipe(source).with_settings(parse_settings(settings) | ({"data.path": data} if data else {}))
        _refuse_text(recipe.architecture)  # now rather than after training
        data = data or recipe.data.path
        run, parts = loop.start(recipe, folder / "run")
        progress(f"training {run.architecture} on {run.data['name']} ({len(parts.train)} rows)")
        with progress_bar("epoch") as update:
            loop.train(run, parts, folder / "run", lambda epoch: update(epoch.number, epoch.total, str(epoch)))
        network = find_source(str(folder / "run"))
    else:
        if is_run(source):
            _refuse_text(Run.open(source).architecture)
        network = find_source(source)
        if is_run(source):
            data = data or Run.open(source).recipe["data"]["path"]
    return Origin(network, export(network, target, progress=progress), data)


def _refuse_text(architecture: str) -> None:
    if find(architecture).takes == ("tokens",):
        raise SourceError(
            f"{architecture} takes text, and deploy measures networks on images and columns only; "
            "go step by step: edgekit train, export, check, optimize, quantize, verify, evaluate"
        )


def _quantize_all(
    bundle: Bundle,
    folder: Path,
    schemes: tuple[str, ...],
    budget: Budget,
    quality: Quality,
    calibration: Calibration | None,
    threads: int,
    progress: Progress,
) -> tuple[list[VariantResult], list[QuantizeReport]]:
    """Every scheme on the whole graph; where that is refused, on one operator type alone, the heaviest first."""
    usual = {name: SCHEMES[name] for name in _USUAL_SCHEMES}  # others must be asked for
    applicable = [name for name, scheme in usual.items() if calibration is not None or not scheme.needs_calibration]
    results: list[VariantResult] = []
    attempts: list[QuantizeReport] = []

    def attempt(scheme: str, only: tuple[str, ...]) -> QuantizeReport | None:
        """The figures of one attempt, kept or refused; None if it never came to figures."""
        name = scheme + (f" {'+'.join(only)}" if only else "")
        target = folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.bundle"
        row = VariantResult(name, "kept", target.name)
        try:
            report = quantize(
                bundle,
                target,
                scheme=scheme,
                only=only,
                quality=quality,
                calibration=calibration,
                budget=budget,
                threads=threads,
                progress=lambda step: progress(f"{name}: {step}"),
            )
        except MeasuredRefusal as refusal:
            report = refusal.report
            row = VariantResult(name, "refused", reason="; ".join(report.refusals))
        except (DataError, QuantizationRefused) as refusal:
            results.append(VariantResult(name, "refused", reason=str(refusal)))
            return None
        row.bytes, row.metric, row.ratio = report.bytes_after, report.metric_after, report.latency_ratio
        results.append(row)
        attempts.append(report)
        return report

    results += [
        VariantResult(name, "not tried", reason="needs --data to calibrate on")
        for name in usual
        if not schemes and name not in applicable
    ]
    for scheme in schemes or applicable:
        whole = attempt(scheme, ())
        if whole is None or whole or scheme == "fp16":
            continue
        for operator in _operators_by_weight(whole):
            if attempt(scheme, (operator,)):
                break
    return results, attempts


def _operators_by_weight(report: QuantizeReport) -> list[str]:
    """The quantized operator types, heaviest first; none if there is only one, which has just been tried."""
    totals: dict[str, int] = {}
    for node in report.nodes:
        if node.quantized:
            totals[node.operator] = totals.get(node.operator, 0) + node.weights
    return sorted(totals, key=lambda operator: -totals[operator]) if len(totals) > 1 else []


def _torch_row(
    network: Exportable | None, bundle: Bundle, found: BundleData | None, quality: Quality
) -> tuple[list[VariantResult], tuple[int, int] | None]:
    """PyTorch on the same test rows, and on how many of them the bundle gives the same answer."""
    if network is None:
        return [], None
    size = sum(tensor.numel() * tensor.element_size() for tensor in network.graph.module.parameters())
    if found is None:
        return [VariantResult(TORCH, "reference", None, size)], None
    outputs = loop.predict(network.graph.module, found.test)
    same = None
    if bundle.manifest.task == "classification":
        equal = outputs.argmax(axis=-1) == predict_all(bundle, found.test.inputs).argmax(axis=-1)
        same = (int(equal.sum()), len(equal))
    return [VariantResult(TORCH, "reference", None, size, quality.metric.compute(outputs, found.test.targets))], same


def _bench(
    source: str, network: Exportable | None, rows: list[VariantResult], folder: Path, threads: int, progress: Progress
) -> BenchReport:
    progress("timing all variants against each other")
    kept = [item for item in rows if item.bundle]
    variants = [bundle_variant(folder / str(item.bundle), name=item.name, threads=threads) for item in kept]
    fp32 = folder / str(kept[0].bundle)
    if network is not None:
        variants.append(torch_variant(str(fp32), source if network.source["kind"] == "function" else TORCH, threads=threads))
    batch = natural_batch(Bundle.open(fp32).graph()[1].signature)
    with progress_bar("round") as update:
        return bench(variants, batches=(batch,), threads=threads, progress=update)


def _fill_in(rows: list[VariantResult], parity: dict[str, Any], timings: BenchReport, batch: int) -> None:
    """Verdicts of the goldens and latencies, into the rows."""
    fp32 = timings.timing(FP32, batch).latency
    for item in rows:
        if item.bundle:
            item.verified = bool(parity[item.name])
        if item.name == FP32:
            item.latency = fp32
            continue
        if item.bundle or item.name == TORCH:
            item.ratio = timings.timing(item.name, batch).ratio
        if (
            item.ratio is not None
        ):  # by the paired ratio, which holds where medians drift; a refused one was timed when it was tried
            low, high = item.ratio.low or item.ratio.median, item.ratio.high or item.ratio.median
            item.latency = Estimate(fp32.median * item.ratio.median, fp32.median * low, fp32.median * high)


def _training(network: Exportable | None) -> dict[str, Any] | None:
    if network is None or network.source["kind"] != "run":
        return None
    metrics = {key: network.source["metrics"][key] for key in ("metric", "test", "epochs")}
    return {"architecture": network.source["architecture"], "data": (network.data or {})["name"], **metrics}


def _write_sample(found: BundleData | None, folder: Path) -> bool:
    """A few raw test rows, so that the report's command can be run as it is."""
    if found is None:
        return False
    buffer = io.BytesIO()
    np.savez(buffer, inputs=found.test.inputs[:_SAMPLES], targets=found.test.targets[:_SAMPLES])
    (folder / SAMPLE).write_bytes(buffer.getvalue())
    return True
