"""`make quantization-matrix`: every architecture in every scheme, measured and written to docs/quantization.md, and the trained
small ones to a table in docs/guide-quantize.md.

    python -m tests.quantization_matrix                                the pages again, from docs/quantization.json
    python -m tests.quantization_matrix --work DIR [--runs DIR] [--only REGEX] [--again]

The second form measures what has not been measured (with --again everything) of what REGEX finds in "architecture/scheme", and
keeps exported bundles in DIR. `edgekit export`, `edgekit optimize` and `edgekit quantize --scheme auto` are processes of their
own, as a user would call them; the schemes alone are made and judged as `edgekit quantize` does, but in one race together.
An architecture with a finished run of its recipe in --runs is measured with those weights on its held-out data; others have
fresh weights and are compared with themselves in fp32. A cell without figures has the reason.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from architectures.catalog import CATALOG
from architectures.settings import apply_settings
from exporters.graph import read_model
from runtime.bundle import Bundle
from runtime.errors import EdgekitError
from runtime.machine import available_cpus, describe_machine
from toolkit.console import note

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "quantization.json"
PAGE = ROOT / "docs" / "quantization.md"
GUIDE = ROOT / "docs" / "guide-quantize.md"
_MARKS = "<!-- written by make quantization-matrix -->", "<!-- up to here -->"  # around the guide's table
_AUTO = "auto"
_ALONE: dict[str, tuple[str, dict[str, str]]] = {
    "int8-static": ("int8-static", {}),
    "int8-dynamic": ("int8-dynamic", {}),
    "int8-weights": ("int8-weights", {}),
    "int4-weights": ("int4-weights", {}),
    "fp16": ("fp16", {}),
    "fp16, stored": ("fp16", {"arithmetic": "float32"}),
    "bf16": ("bf16", {}),
}
SCHEMES = (*_ALONE, _AUTO)
_SLOW = "int8-dynamic"  # on convolutions many times slower than the others, who would wait for it
_EQUAL = 1.03  # of latency: what a race cannot tell apart
_RACED = ("label", "bytes", "ratio", "drop")
_SMALL = 2_000_000  # parameters: networks that most CPUs run fastest on one thread
_MINUTES = 120  # for one step
_NOT_MEASURED = "not measured: "
_SECONDS = {0: 120, 26_000_000: 600, 300_000_000: 900, 350_000_000: 2400}  # for auto, on networks of more parameters

Cell = dict[str, Any]


def measure(name: str, work: Path, runs: Path | None, schemes: list[str], known: dict[str, Cell]) -> None:
    """Fill in the cells of one architecture."""
    bundle, trained = _bundle(name, work, runs)
    if isinstance(bundle, str):
        known |= {f"{name}/{scheme}": {"reason": bundle} for scheme in schemes}
        return
    if (twin := _twin(name, bundle, work)) is not None:
        reason = f"{_NOT_MEASURED}its batch norms are folded, and what is left is the graph of {twin}; see there"
        known |= {f"{name}/{scheme}": {"reason": reason} for scheme in schemes}
        return
    threads = 1 if CATALOG[name].parameters() < _SMALL else available_cpus()  # one number for every scheme of a network
    about = {"trained": trained, "cpu": describe_machine()["cpu"]}
    alone = [scheme for scheme in schemes if scheme != _AUTO]
    for scheme, cell in (_alone(bundle, alone, threads, work) if alone else {}).items():
        known[f"{name}/{scheme}"] = about | cell
    _save(known)
    if _AUTO in schemes:
        note(f"{name}: auto")
        known[f"{name}/{_AUTO}"] = about | _auto(bundle, threads, work, _seconds(CATALOG[name].parameters()))


def _bundle(name: str, work: Path, runs: Path | None) -> tuple[Path | str, bool]:
    """The optimized fp32 bundle, or why there is none; and whether its weights were trained."""
    run = runs / name if runs is not None else None
    record = run / "run.json" if run is not None else None
    trained = record is not None and record.exists() and json.loads(record.read_text())["status"] == "complete"
    source, target = str(run) if trained else name, work / f"{name}{'-trained' if trained else ''}.bundle"
    if target.exists():
        return target, trained
    exported = work / f"{name}.exported.bundle"
    profile = ("--profile", "onnxruntime") if "tokens" in CATALOG[name].takes else ()
    for command in (
        ("export", source, "-o", str(exported), "--force", *profile),
        ("optimize", str(exported), "-o", str(target)),
    ):
        code, _, error = _edgekit(command)
        if code:
            return f"{command[0]} failed: {error}", trained
    return target, trained


def _twin(name: str, bundle: Path, work: Path) -> str | None:
    """The architecture without batch norms whose graph has the same operators, attributes and shapes of weights."""
    plain = name.removesuffix("-bn")
    other = work / f"{plain}.bundle"
    return plain if plain != name and other.exists() and _structure(other) == _structure(bundle) else None


def _structure(path: Path) -> list[Any]:
    model = read_model(Bundle.open(path).graph_path())
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    return [
        (node.op_type, sorted(str(item) for item in node.attribute), [shapes.get(given) for given in node.input])
        for node in model.graph.node
    ]


def _alone(path: Path, schemes: list[str], threads: int, work: Path) -> dict[str, Cell]:
    """Schemes by themselves, in one race with the original."""
    from exporters.quantize import Budget, Made, built, judged
    from exporters.quantized_graphs import Part
    from exporters.quantizers import scheme_for
    from exporters.race import measure_speeds, timed_batch
    from toolkit.evaluation import quality_for

    bundle = Bundle.open(path)
    quality, calibration = quality_for(bundle, None)
    quality = replace(quality, details=None)
    cells: dict[str, Cell] = {}
    made: dict[str, Made] = {}
    parts: dict[str, tuple[Part, ...]] = {}
    with TemporaryDirectory(dir=work) as folder:
        for label in schemes:
            note(f"{path.name}: {label}")
            scheme, settings = _ALONE[label]
            parts[label] = (
                Part(scheme, apply_settings(scheme_for(scheme, bundle.manifest).settings, settings, kind="setting")),
            )
            place = Path(folder) / label
            place.mkdir()
            try:
                made[label] = built(bundle, parts[label], calibration, threads, place, for_size=False)
            except EdgekitError as refusal:
                cells[label] = {"kept": False, "reason": str(refusal)}
        before = quality.measure(bundle)
        groups = [label for label in made if label != _SLOW], [label for label in made if label == _SLOW]
        for group in filter(None, groups):
            note(f"{path.name}: a race of {len(group)}")
            speeds = measure_speeds(bundle, [made[label].bundle for label in group], timed_batch(bundle), (threads,))
            for label, speed in zip(group, speeds, strict=True):
                scores = before, quality.measure(made[label].bundle)
                found = judged(bundle, made[label], parts[label], *_ALONE[label], speed, quality, scores, Budget())
                cells[label] = _cell(found.to_json())
    return cells


def _seconds(parameters: int) -> int:
    return max(seconds for above, seconds in _SECONDS.items() if parameters > above)


def _auto(bundle: Path, threads: int, work: Path, seconds: int) -> Cell:
    target = work / "quantized.bundle"
    options = ("--time", str(seconds), "--threads", str(threads), "--force", "--json")
    _, output, error = _edgekit(("quantize", str(bundle), "--scheme", _AUTO, "-o", str(target), *options))
    if not output:
        return {"kept": False, "reason": error}
    found = json.loads(output)
    raced = [{key: item[key] for key in _RACED} for item in found["raced"]]
    chosen = {"chosen": found["chosen"], "reason": found["chosen"], "raced": raced}
    return _cell(found["report"]) | chosen | ({"untried": found["untried"]} if found["untried"] else {})


def _cell(report: Cell) -> Cell:
    keys = ("size_ratio", "latency_ratio", "metric", "unit", "metric_before", "metric_after", "drop", "max_drop", "kept")
    return {"reason": "; ".join(report["refusals"]), **{key: report[key] for key in keys}}


def _edgekit(command: tuple[str, ...]) -> tuple[int, str, str]:
    """Exit code, standard output, and the last line of what was said."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "toolkit", *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=60 * _MINUTES,
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"not finished after {_MINUTES} minutes"
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return done.returncode, done.stdout.strip(), last.removeprefix("error: ")


def page(record: dict[str, Any]) -> str:
    cpus = Counter(cell["cpu"] for cell in record["cells"].values() if "cpu" in cell)
    usual = cpus.most_common(1)[0][0]
    lines = [
        "# Quantization, measured",
        "",
        "Architectures in every scheme. Written by `make quantization-matrix`; the figures are in",
        "[quantization.json](quantization.json). Size and latency are ratios to the optimized fp32",
        "bundle, latency at batch 1 (a decoder: one token) with its 95 % interval. *Trained* networks are judged by their",
        "task's metric on held-out data; the others have fresh weights and are compared with their own fp32 answers by",
        "[agreement or likelihood](guide.md#how-quantization-is-judged); agreement is harder on them than a task is.",
        "",
        "The schemes alone ran one race (of networks too large for that, several), `auto` another one, with `--time 120`,",
        "above 26 million parameters 600, above 300 million 900, above 350 million 2400; an interval covers its own race only,",
        "and another hour gives other figures. A ratio a little above one is kept where the machine's noise in that race",
        "reached as far. *fp16, stored* is fp16 with `arithmetic=float32`; `block`, `head` and other settings are in the",
        "[guide](guide-quantize.md); *without 2 nodes*",
        "means that these stayed in float32 or went to the scheme after the plus.",
        "",
        f"Measured on {usual} where nothing else is said, {record['threads']} threads (networks of less than two million",
        f"parameters: one), onnxruntime {record['onnxruntime']}.",
        "",
    ]
    if missing := [name for name in CATALOG if not any(key.startswith(f"{name}/") for key in record["cells"])]:
        lines += [f"Not measured yet: {', '.join(missing)}.", ""]
    lines += _auto_lines(record["cells"])
    for name in CATALOG:
        cells = {scheme: record["cells"][f"{name}/{scheme}"] for scheme in SCHEMES if f"{name}/{scheme}" in record["cells"]}
        if not cells or _why_not_measured(cells):
            continue
        trained = ", trained" if any(cell.get("trained") for cell in cells.values()) else ""
        others = sorted({cell["cpu"] for cell in cells.values() if "cpu" in cell} - {usual})
        place = f", on {' and '.join(others)}" if others else ""
        lines += [f"## {name}{trained}{place}", "", "| scheme | size | latency | metric | verdict |", "|---|---|---|---|---|"]
        lines += [_row(scheme, cell) for scheme, cell in cells.items()]
        lines.append("")
    return "\n".join([*lines, *_left_out(record["cells"])])


def _left_out(cells: dict[str, Cell]) -> list[str]:
    found = {name: _why_not_measured({s: cells[k] for s in SCHEMES if (k := f"{name}/{s}") in cells}) for name in CATALOG}
    rows = [f"- {name}: {reason}" for name, reason in found.items() if reason]
    return ["## Not measured, in any scheme", "", *rows, ""] if rows else []


def _why_not_measured(cells: dict[str, Cell]) -> str | None:
    """The reason, if it is one for all."""
    reasons = {cell["reason"] for cell in cells.values()}
    reason = reasons.pop() if len(reasons) == 1 else ""
    return reason.removeprefix(_NOT_MEASURED) if reason.startswith(_NOT_MEASURED) else None


def auto_and_alone(cells: dict[str, Cell]) -> dict[str, tuple[Cell, Cell | None]]:
    """What `auto` chose, and the best scheme alone within the budget, both as its last race measured them."""
    found = {}
    for name in CATALOG:
        cell = cells.get(f"{name}/auto", {})
        if "raced" in cell:
            chosen = next(item for item in cell["raced"] if item["label"] == cell["chosen"])
            alone = [item for item in cell["raced"] if _is_alone(item["label"]) and item["drop"] <= cell["max_drop"]]
            found[name] = chosen, _best(alone) if alone else None
    return found


def _auto_lines(cells: dict[str, Cell]) -> list[str]:
    rows = [
        f"| {name} | {_figures(chosen)} | {_figures(best)} | {_compared(chosen, best)} |"
        if best
        else f"| {name} | {_figures(chosen)} | none is within the budget | the only one |"
        for name, (chosen, best) in auto_and_alone(cells).items()
    ]
    if not rows:
        return []
    what = (
        "The fastest within the budget, of those as fast (within 3 %, or 10 % where intervals overlap) the smallest. "
        "Bytes, and latency to fp32's."
    )
    head = ["| | chosen | the best scheme alone | chosen is |", "|---|---|---|---|"]
    return ["## What auto chooses, and the best scheme alone", "", what, "", *head, *rows, ""]


def _is_alone(label: str) -> bool:
    """Whether it names one scheme, perhaps with settings, and no more."""
    return re.fullmatch(r"[\w-]+( \([^()]*\))?", label) is not None


def _best(items: list[Cell]) -> Cell:
    fastest = min(item["ratio"]["median"] for item in items)
    return min((item for item in items if item["ratio"]["median"] <= _EQUAL * fastest), key=lambda item: item["bytes"])


def _figures(item: Cell) -> str:
    return f"{item['label']}: {item['bytes']:,}, {item['ratio']['median']:.2f}"


def advantage(chosen: Cell, best: Cell) -> tuple[float, float]:
    """How many times as fast, one if that cannot be told apart; and its size to the other's."""
    speed = best["ratio"]["median"] / chosen["ratio"]["median"]
    return speed if speed > _EQUAL or speed < 1 / _EQUAL else 1.0, chosen["bytes"] / best["bytes"]


def _compared(chosen: Cell, best: Cell) -> str:
    speed, size = advantage(chosen, best)
    if chosen["label"] == best["label"] or (speed, size) == (1, 1):
        return "the same"
    pace = "" if speed == 1 else f"{speed:.2f} times as fast, " if speed > 1 else f"{1 / speed:.2f} times as slow, "
    return f"{pace}{size:.2f} of the size"


def _row(scheme: str, cell: Cell) -> str:
    reason = " ".join(str(cell["reason"]).split()).replace("|", "\\|")
    if "size_ratio" not in cell:
        return f"| {scheme} | – | – | – | refused: {reason} |"
    ratio = cell["latency_ratio"]
    interval = "" if ratio["low"] is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    unit = f" {cell['unit']}" if cell["unit"] else ""
    metric = f"{cell['metric']} {cell['metric_before']:.4g} → {cell['metric_after']:.4g}{unit}"
    verdict = f"kept{f': {reason}' if reason else ''}" if cell["kept"] else f"refused: {reason}"
    return f"| {scheme} | {cell['size_ratio']:.2f} | {ratio['median']:.2f}{interval} | {metric} | {verdict} |"


def short_table(record: dict[str, Any]) -> str:
    """The guide's: trained networks, a line each."""
    cells: dict[str, Cell] = record["cells"]
    names = [name for name in CATALOG if cells.get(f"{name}/auto", {}).get("trained")]
    lines = ["", f"| | {' | '.join(SCHEMES)} |", "|---" * (1 + len(SCHEMES)) + "|"]
    lines += [f"| {name} | {' | '.join(_short(cells.get(f'{name}/{scheme}')) for scheme in SCHEMES)} |" for name in names]
    return "\n".join([*lines, ""])


def _short(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if "size_ratio" not in cell:
        return "–"
    text = f"{cell['size_ratio']:.2f} / {cell['latency_ratio']['median']:.2f} / {cell['drop']:+.2f}"
    return text if cell["kept"] else f"*{text}*"


def _load() -> dict[str, Cell]:
    found: dict[str, Cell] = json.loads(RECORD.read_text())["cells"] if RECORD.exists() else {}
    return found


def _save(cells: dict[str, Cell]) -> None:
    ordered = {key: cells[key] for name in CATALOG for scheme in SCHEMES if (key := f"{name}/{scheme}") in cells}
    record = {"onnxruntime": describe_machine()["onnxruntime"], "threads": available_cpus(), "cells": ordered}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    _write_pages(record)


def _write_pages(record: dict[str, Any]) -> None:
    PAGE.write_text(page(record), encoding="utf-8")
    guide = GUIDE.read_text(encoding="utf-8")
    before, rest = guide.split(_MARKS[0])
    GUIDE.write_text(f"{before}{_MARKS[0]}{short_table(record)}{_MARKS[1]}{rest.split(_MARKS[1])[1]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Every architecture in every scheme.")
    parser.add_argument("--work", type=Path, help="where bundles are kept; without it nothing is measured")
    parser.add_argument("--runs", type=Path, help="finished runs of the recipes")
    parser.add_argument("--only", default="", metavar="REGEX", help='of "architecture/scheme"')
    parser.add_argument("--again", action="store_true", help="measure what has been measured, too")
    arguments = parser.parse_args()
    if arguments.work is None:
        _write_pages(json.loads(RECORD.read_text()))
        return
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    known = _load()
    for name in sorted(CATALOG, key=lambda name: CATALOG[name].parameters()):  # the small ones first: hours lie between them
        wanted = [scheme for scheme in SCHEMES if re.search(arguments.only, f"{name}/{scheme}")]
        missing = [scheme for scheme in wanted if arguments.again or f"{name}/{scheme}" not in known]
        if missing:
            measure(name, work, arguments.runs and arguments.runs.absolute(), missing, known)
            _save(known)


if __name__ == "__main__":
    main()
