"""What a deployment found out: one row a variant, and the reports of every step."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.statistics import Estimate

from ..benchmark import ratio_text
from ..console import number_text, size_text, table, time_text

FP32 = "fp32"
REPORT_DATA = "report.json"
REPORT_PAGE = "report.html"
SAMPLE = "sample.npz"


@dataclass
class VariantResult:
    """A row of the report: PyTorch, the exported network, or an attempt at making it smaller."""

    name: str
    verdict: str  # "reference", "kept", "refused" or "not tried"
    bundle: str | None = None  # folder inside the report's
    bytes: int | None = None
    metric: float | None = None
    latency: Estimate | None = None
    ratio: Estimate | None = None  # to fp32
    reason: str = ""
    verified: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"latency": self.latency and vars(self.latency), "ratio": self.ratio and vars(self.ratio)}


@dataclass
class DeployReport:
    name: str
    task: str
    source: str
    metric: str
    unit: str
    metric_data: str
    input_names: list[str]
    training: dict[str, Any] | None
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
    attempts: list[dict[str, Any]] = field(default_factory=list)

    def variant(self, name: str) -> VariantResult:
        return next(item for item in self.variants if item.name == name)

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"variants": [item.to_json() for item in self.variants]}


def summary(report: DeployReport, output: str) -> str:
    """The short table at the end, and where to go from here."""
    rows = []
    for item in report.variants:
        metric = "–" if item.metric is None else f"{number_text(item.metric)} {report.unit}".strip()
        ratio = "1" if item.name == FP32 else ("–" if item.ratio is None else ratio_text(item.ratio))
        latency = "–" if item.latency is None else time_text(item.latency.median)
        size = "–" if item.bytes is None else size_text(item.bytes)
        rows.append([item.name, metric, size, latency, ratio, item.verdict])
    lines = ["", table(["variant", report.metric, "size", "latency", "ratio", "verdict"], rows), ""]
    lines += [f"refused {item.name}: {_short(item.reason)}" for item in report.variants if item.verdict == "refused"]
    lines += [f"not tried: {item.name}, {item.reason}" for item in report.variants if item.verdict == "not tried"]
    if report.bench["warning"]:
        lines.append(f"warning: {report.bench['warning']}")
    if report.same_answers:
        lines.append(f"fp32 answers as PyTorch on {report.same_answers[0]} of {report.same_answers[1]} test rows")
    folder, bundle = Path(output), str(report.variant(report.winner).bundle)
    lines += [f"smallest within the budget: {report.winner}", f"bundle: {folder / bundle}"]
    if report.has_sample:
        lines.append(f"run it: edgekit run {folder / bundle} --input {folder / SAMPLE}")
    lines.append(f"report: {folder / REPORT_PAGE}")
    return "\n".join(lines)


def _short(reason: str) -> str:
    """Every reason, without its figures in brackets."""
    return re.sub(r" \(95 %.*?\)", "", reason)
