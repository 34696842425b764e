"""Bundle → leaner, faster bundle: a list of small passes, each verified on its own.

After every pass the graph answers the goldens, and at other sizes it answers as before. A pass that breaks that is reverted and
named with the smallest subgraph that shows it; one that makes the graph measurably slower is reverted too.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from runtime.bundle import Bundle, Manifest, lineage_step, write_bundle
from runtime.errors import EdgekitError
from runtime.verify import OutputComparison

from .graph import clean, copy_of, read_without_weights, requirements_of
from .heads import Head, add_head
from .pace import Pace, Workload, compare_pace
from .pass_trials import Trial, Trials, trials_of, workload_of
from .passes import PASSES, Pass, passes_for
from .quantizers.quiet import quiet
from .rewrites.engine import Rewritten
from .smallest import smallest_difference
from .tensors import large_tensors
from .weights import is_large, moved_out, pack_graphs, read_mapped, size_of

__all__ = ["PASSES", "GraphResult", "OptimizeReport", "Pass", "PassResult", "optimize", "passes_for"]

Progress = Callable[[int, int, str], None]  # passes done, passes in all, what comes now


@dataclass(frozen=True)
class PassResult:
    graph: str
    name: str
    nodes_before: int
    nodes_after: int
    bytes_before: int
    bytes_after: int
    outcome: str  # "applied", "nothing to do", or "reverted: …"
    error: float | None = 0.0  # largest difference from the goldens after the pass; None if nothing could be compared
    matches: int | None = None  # places it changed; None for passes that do not count
    refusals: tuple[str, ...] = ()  # why places that looked right were left alone
    pace: tuple[Pace, ...] = ()  # latency before and after, where measured

    @property
    def applied(self) -> bool:
        return self.outcome == "applied"


@dataclass(frozen=True)
class GraphResult:
    """One graph from first to last."""

    graph: str
    nodes_before: int
    nodes_after: int
    bytes_before: int
    bytes_after: int
    pace: tuple[Pace, ...] = ()  # empty if nothing changed or nothing was measured


@dataclass(frozen=True)
class OptimizeReport:
    bundle: str
    passes: tuple[PassResult, ...]
    graphs: tuple[GraphResult, ...]
    head: str | None = None

    @property
    def changed(self) -> bool:
        return self.head is not None or any(result.applied for result in self.passes)

    @property
    def bytes_before(self) -> int:
        return sum(graph.bytes_before for graph in self.graphs)

    @property
    def bytes_after(self) -> int:
        return sum(graph.bytes_after for graph in self.graphs)

    def to_json(self) -> dict[str, Any]:
        sizes = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        return {**asdict(self), **sizes, "changed": self.changed}


@dataclass
class _Work:
    """One graph on its way through the passes."""

    name: str
    original: onnx.ModelProto
    model: onnx.ModelProto
    trials: Trials
    workload: Workload  # inputs to time; none: nothing is timed
    folder: Path | None  # where new weights of a large graph are kept; None: in the graph
    results: list[PassResult] = field(default_factory=list)
    pace: tuple[Pace, ...] = ()  # of the whole, first against last


def optimize(
    bundle: Bundle,
    target: str | Path,
    *,
    force: bool = False,
    passes: tuple[Pass, ...] | None = None,
    portable: bool = False,
    timing: bool = False,
    head: Head | None = None,
    progress: Progress = lambda done, total, step: None,
) -> OptimizeReport:
    """Write the optimized bundle at `target` and say what each pass did to each graph.

    `portable` keeps to standard operators. With `timing` every rewrite must not be slower than the graph before it, nor the
    last graph slower than the first. `head` replaces the logits by the tokens chosen from them.
    """
    chosen = passes_for(portable=portable) if passes is None else passes
    works: list[_Work] = []
    total = len(bundle.manifest.graphs) * len(chosen)
    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
        for name in bundle.manifest.graphs:
            tell = partial(_tell, progress, len(works) * len(chosen), total)
            works.append(_optimized(bundle, name, chosen, timing, Path(folder), tell))
        models = {work.name: work.model for work in works}
        results = [result for work in works for result in work.results]
        lineage = lineage_step("optimize", bundle, passes=[_recorded(result) for result in results], head=head and str(head))
        manifest = replace(bundle.manifest, lineage=lineage)
        goldens: dict[str, bytes | Path] = {golden.file: bundle.root / golden.file for golden in manifest.goldens}
        if head is not None:
            models, manifest, goldens = add_head(head, models, manifest, bundle)
        _write(target, bundle, manifest, models, goldens, Path(folder), force)
        graphs = tuple(_summary(work, models[work.name], manifest) for work in works)
    return OptimizeReport(str(target), tuple(results), graphs, None if head is None else str(head))


def _tell(progress: Progress, before: int, total: int, step: int, text: str) -> None:
    progress(before + step, total, text)


def _optimized(
    bundle: Bundle, name: str, passes: tuple[Pass, ...], timing: bool, folder: Path, progress: Callable[[int, str], None]
) -> _Work:
    model = clean(read_mapped(bundle.graph_path(name)))
    large = is_large(model)
    if large:
        model = moved_out(model, folder / f"{name}.data")
    trials = trials_of(bundle, name, model)
    workload = workload_of(trials, model) if timing else ()
    work = _Work(name, model, model, trials, workload, folder if large else None)
    for number, item in enumerate(passes):
        progress(number, f"{name}: {item.name}")
        _run(item, work)
        if large:
            gc.collect()  # what passes work on refers to itself in circles, and holds all weights
    progress(len(passes), f"{name}: the whole")
    _refuse_slower_whole(work)
    return work


def _run(item: Pass, work: _Work) -> None:
    """Replace the work's model by what the pass makes of it, unless that changes nothing or breaks something."""
    model = work.model
    try:
        with quiet():
            made = item.apply(copy_of(model))
    except Exception as failure:  # a library's pass may stumble over a graph; the graph before it still stands
        text = f"reverted: it failed with {type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        work.results.append(_result(item, work, model, text))
        return
    counted = isinstance(made, Rewritten)
    rewritten = made if isinstance(made, Rewritten) else Rewritten(made, 0, ())
    after = rewritten.model
    if work.folder is not None:
        after = moved_out(after, work.folder / f"{work.name}.{item.name}.data")
    more: dict[str, Any] = {"matches": rewritten.matches, "refusals": rewritten.refusals} if counted else {}
    if (counted and not rewritten.matches) or _shape_of(after) == _shape_of(model):
        work.results.append(_result(item, work, model, "nothing to do", **more))
        return
    error, problem = _problem(work, after)
    if problem:
        work.results.append(_result(item, work, model, f"reverted: {problem}", error=error, **more))
        return
    if not counted and len(after.graph.node) >= len(model.graph.node) and _weight_bytes(after) >= _weight_bytes(model):
        work.results.append(_result(item, work, model, "nothing to do"))  # it only shuffled names
        return
    pace = compare_pace(model, after, work.trials.signature, work.workload, clock="cpu") if item.timed else ()
    if reason := _too_slow(item, pace, _is_tied(model)):
        work.results.append(_result(item, work, model, reason, error=error, pace=pace, **more))
        return
    work.results.append(_result(item, work, after, "applied", error=error, pace=pace, **more))
    work.model = after


def _is_tied(model: onnx.ModelProto) -> bool:
    """Whether only onnxruntime can run the graph."""
    return any(node.domain not in ("", "ai.onnx") for node in model.graph.node)


def _too_slow(item: Pass, pace: tuple[Pace, ...], tied: bool) -> str | None:
    """Why a pass is not worth it. One that ties a graph to onnxruntime, or is doubtful, must win somewhere; others need only
    not lose."""
    slowest = max(pace, key=lambda one: one.ratio.low or 0.0, default=None)
    if slowest is None:
        return None
    if slowest.slower:
        return f"reverted: {slowest.ratio.median:.2f} times slower at {slowest.sizes}"
    if not item.standard and (item.doubtful or not tied) and not any(one.faster for one in pace):
        best = min(pace, key=lambda one: one.ratio.median)
        return f"reverted: not faster ({best.ratio.median:.2f} of the time at best), and only onnxruntime could run it"
    return None


def _result(item: Pass, work: _Work, after: onnx.ModelProto, outcome: str, **more: Any) -> PassResult:
    before = work.model
    nodes, sizes = (len(before.graph.node), len(after.graph.node)), (size_of(before), size_of(after))
    return PassResult(work.name, item.name, *nodes, *sizes, outcome, **more)


def _problem(work: _Work, after: onnx.ModelProto) -> tuple[float | None, str | None]:
    """The largest error of the changed graph, if it has answers to compare, and what is wrong with it, if anything is."""
    try:
        error, failed, trial = work.trials.judge(after)
    except EdgekitError as failure:
        return None, str(failure)
    if failed is None or trial is None:
        return error, None
    text = f"output {failed.output!r} at {failed.golden} {failed.problem} (allowed {failed.allowed:.2e})"
    place = smallest_difference(work.model, after, trial.inputs, relative=_relative(failed, trial))
    return error if math.isfinite(error) else None, f"{text}; smallest subgraph: {place}" if place else text


def _relative(failed: OutputComparison, trial: Trial) -> float:
    """The allowed error as a share of the output's largest value: what counts as a difference inside the graph."""
    largest = float(np.max(np.abs(trial.expected[failed.output].astype(np.float64)), initial=0.0))
    return max(failed.allowed / largest if largest else 0.0, float(np.finfo(np.float32).eps))


def _refuse_slower_whole(work: _Work) -> None:
    """Passes that are not slower one by one may be so together, or hide within the noise: the whole is measured too."""
    if not work.workload or work.model is work.original:
        return
    pace = compare_pace(work.original, work.model, work.trials.signature, work.workload, clock="wall")
    slowest = max(pace, key=lambda one: one.ratio.low or 0.0)
    if not slowest.slower:
        work.pace = pace
        return
    text = f"reverted: all passes together are {slowest.ratio.median:.2f} times slower at {slowest.sizes}"
    size = size_of(work.original)
    work.results = [
        replace(result, outcome=text, nodes_after=result.nodes_before, bytes_after=size) if result.applied else result
        for result in work.results
    ]
    work.model = work.original


def _summary(work: _Work, final: onnx.ModelProto, manifest: Manifest) -> GraphResult:
    pace = work.pace
    if work.workload and final is not work.model:  # a head was added
        signature = manifest.graphs[work.name].signature
        pace = compare_pace(work.original, final, work.trials.signature, work.workload, clock="wall", after_signature=signature)
    sizes = (size_of(work.original), size_of(final))
    return GraphResult(work.name, len(work.original.graph.node), len(final.graph.node), *sizes, pace)


def _recorded(result: PassResult) -> dict[str, Any]:
    """What the manifest keeps of a pass: not the timings, which belong to this machine and this hour."""
    kept = asdict(result)
    del kept["pace"]
    return kept


def _write(
    target: str | Path,
    bundle: Bundle,
    manifest: Manifest,
    models: dict[str, onnx.ModelProto],
    goldens: dict[str, bytes | Path],
    folder: Path,
    force: bool,
) -> None:
    packed, weights = pack_graphs(models, folder, external=_weights_are_outside(bundle))
    graphs = {name: replace(graph, file=f"{name}.onnx", weights=weights[name]) for name, graph in manifest.graphs.items()}
    requirements = requirements_of(*models.values()) | {"cpu_features": manifest.requirements["cpu_features"]}
    replaced = {name for graph in bundle.manifest.graphs.values() for name in (graph.file, *graph.weights)}
    old_goldens = {golden.file for golden in bundle.manifest.goldens}
    others: dict[str, bytes | Path] = {
        name: bundle.root / name for name in bundle.manifest.files if name not in replaced | old_goldens
    }
    manifest = replace(manifest, graphs=graphs, requirements=requirements)
    write_bundle(target, manifest, {**packed, **goldens, **others}, force=force)


def _weights_are_outside(bundle: Bundle) -> bool:
    """Whether the bundle keeps all its large weights beside its graphs, not only those that graphs share."""
    graphs = bundle.manifest.graphs.values()
    inside = (tensor for graph in graphs for tensor in large_tensors(read_without_weights(bundle.root / graph.file)))
    return any(graph.weights for graph in graphs) and next(inside, None) is None


def _weight_bytes(model: onnx.ModelProto) -> int:
    """Size of the graph without the shapes that inference noted, which say nothing new."""
    return size_of(model) - sum(value.ByteSize() for value in model.graph.value_info)


def _shape_of(model: onnx.ModelProto) -> tuple[Any, ...]:
    nodes = tuple((node.op_type, tuple(node.input), tuple(node.output)) for node in model.graph.node)
    return nodes, tuple(sorted(tensor.name for tensor in model.graph.initializer))
