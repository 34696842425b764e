"""`--scheme auto`: which scheme on which nodes, found by measuring.

    alone      every scheme on all that it can take, with its settings varied where that may help
    together   the fastest of them without operators or narrow convolutions, and with another scheme on what they leave
    pruned     where quality misses the budget: without the nodes that cost most (sensitivity.py), which another scheme takes
    stored     whatever is still in float32, stored in 16 bits, which costs no time
    finals     the best few, every scheme alone that may be the best among them, in one race with the original and a copy of it

The last race is the gate that any scheme has to pass, and the best of those that pass it is written (preference.py). So what is
written is never worse than a scheme alone that passed the same gate. If none of the best passes, every other scheme alone is
raced before anything is refused.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from architectures.settings import apply_settings, changed_settings
from runtime.bundle import DECODER, Bundle
from runtime.errors import QuantizationRefused

from .candidates import Candidate, Laboratory, Measured, Setting
from .preference import Preference, Tried, is_alone
from .quantize import (
    MIXED,
    Budget,
    Made,
    Quality,
    QuantizeReport,
    Speed,
    judged,
    measure_speeds,
    refuse_bundle,
    timed_batch,
    write_made,
)
from .quantized_graphs import Part
from .quantizers import SCHEMES, scheme_for
from .quantizers.recurrent import FLOAT32, INT8, OPERATORS, STEP_BY_STEP
from .quantizers.scheme import HALVES, Calibration, NodeDecision, Scheme, quantizable
from .sensitivity import sensitivity
from .weights import read_mapped

AUTO = "auto"
_LIKELIEST_FIRST = ("int8-static", "int8-weights", "int8-dynamic", "int4-weights", "fp16", "bf16")
_LIKELIEST_OF_DECODERS = ("int4-weights", "int8-weights", "int8-static", "int8-dynamic", "fp16", "bf16")
_FINALISTS = 4
_ALONE_IN_FINALS = 3
_WORTH_STORING = 0.01  # of all weights
_HARDLY_SMALLER = 0.9  # of the original's size: a scheme that takes so little is not tried with other settings
_NARROW = 32  # channels: convolutions with fewer are often slower in int8
_WANTS_SAMPLES = "it needs samples to calibrate on; pass them with --data"
_LAST = 3.0  # candidates' worth of time that the last race of one takes
_VARIED: dict[str, tuple[dict[str, Any], ...]] = {  # settings tried when a scheme's own miss the budget of quality
    "int8-static": ({"ranges": "percentile"}, {"ranges": "mse"}),
    "int4-weights": ({"head": "8"}, {"block": 32}),
}
_SMALLER: dict[str, tuple[dict[str, Any], ...]] = {"int4-weights": ({"block": 256},)}  # … and when they meet it
_STORED = ("fp16", {"arithmetic": "float32"})


@dataclass(frozen=True)
class SearchReport:
    """What was tried, what is best, and what every node became."""

    tried: tuple[Measured, ...]  # in the order of trying
    front: tuple[str, ...]  # labels of those that nothing beats in size, latency and quality at once
    chosen: str
    parts: tuple[Mapping[str, Any], ...]
    nodes: tuple[NodeDecision, ...]  # with the reason in words
    report: QuantizeReport
    raced: tuple[Measured, ...] = ()  # in the last race, with what it gave
    recalled: int = 0  # measured before, in a search that was cut short
    complete: bool = True  # False: time was up before everything had been tried
    untried: tuple[str, ...] = ()  # schemes that time was up before

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"report": self.report.to_json()}


def search(
    bundle: Bundle,
    target: str | Path,
    *,
    quality: Quality,
    calibration: Calibration | None = None,
    budget: Budget | None = None,
    batch: int | None = None,
    threads: int,
    seconds: float | None = None,
    force: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> SearchReport:
    """Write the best mix within the budget at `target`; raise QuantizationRefused with the nearest miss if there is none."""
    refuse_bundle(bundle)
    budget = budget or Budget()
    size = timed_batch(bundle) if batch is None else batch
    setting = Setting(bundle, quality, calibration, size, threads, budget.for_size)
    laboratory = Laboratory(setting, journal=_journal_of(target), seconds=seconds, progress=progress)
    searcher = _Searcher(laboratory, budget, progress)
    try:
        searcher.run()
        laboratory.close()
        report = searcher.finish(target, force=force)
    except QuantizationRefused:
        laboratory.forget()  # that is an answer, too
        raise
    finally:
        laboratory.close()
    laboratory.forget()
    return report


def _journal_of(target: str | Path) -> Path:
    """Beside the output, or as near to it as there is a folder: a search that is refused makes none."""
    path = Path(target).absolute()
    folder = next(parent for parent in path.parents if parent.is_dir())
    return folder / f"{path.name}.search.json"


class _Searcher:
    def __init__(self, laboratory: Laboratory, budget: Budget, progress: Callable[[str], None]) -> None:
        self._laboratory, self._budget, self._progress = laboratory, budget, progress
        self._bundle = laboratory.setting.bundle
        self._calibration = laboratory.setting.calibration
        metric = laboratory.setting.quality.metric
        self._allowed = metric.default_budget if budget.max_drop is None else budget.max_drop
        self._preference = Preference(budget, self._allowed)
        self._errors: dict[str, float] = {}  # of nodes, where sensitivity was asked for
        self._complete = True

    # Trying

    def run(self) -> None:
        for stage in (self._alone, self._together, self._pruned, self._stored):
            for candidate in stage():
                if self._ran() and not self._laboratory.has_time_for(1 + _LAST):
                    self._complete = False
                    return
                self._laboratory.measure(candidate)

    def _alone(self) -> Iterator[Candidate]:
        """Every scheme, before any is tried with other settings."""
        tried: list[tuple[Scheme, Measured]] = []
        for name in self._applicable():
            scheme = self._scheme(name)
            first = self._varied(scheme, _STORED[1] if name == _STORED[0] else {})
            yield first
            tried.append((scheme, self._laboratory.measure(first)))
            if name == _STORED[0]:
                yield self._varied(scheme, {})
                if self._preference.is_good(tried[-1][1]):
                    break  # bf16 is as small and as fast, and rounds more
        for scheme, found in tried:
            for settings in self._further(scheme, found):
                yield self._varied(scheme, settings)

    def _applicable(self) -> list[str]:
        """A decoder reads all its weights for every token, and fewer bytes are what makes it faster."""
        order = _LIKELIEST_OF_DECODERS if DECODER in self._bundle.manifest.graphs else _LIKELIEST_FIRST
        return [name for name in order if not self._lacks_samples(name)]

    def _lacks_samples(self, name: str) -> bool:
        return self._scheme(name).needs_calibration and self._calibration is None

    def _further(self, scheme: Scheme, found: Measured) -> Iterator[Mapping[str, Any]]:
        if found.problem is not None or found.bytes > _HARDLY_SMALLER * self._bundle.graph_bytes:
            return
        if not self._preference.is_good(found):
            yield from _VARIED.get(scheme.name, ())
        else:
            yield from _SMALLER.get(scheme.name, ())
        reasons = [node.reason for node in found.nodes if node.quantized and node.operator in OPERATORS]
        if reasons and hasattr(scheme.settings, "recurrence"):
            in_steps = all(reason.startswith(STEP_BY_STEP) for reason in reasons)
            yield {"recurrence": FLOAT32 if in_steps else INT8}

    def _varied(self, scheme: Scheme, settings: Mapping[str, Any]) -> Candidate:
        text = ", ".join(f"{key}={value}" for key, value in settings.items())
        label = f"{scheme.name} ({text})" if text else scheme.name
        return Candidate(label, (Part(scheme.name, apply_settings(scheme.settings, settings)),))

    def _together(self) -> Iterator[Candidate]:
        """The fastest schemes without what they are slow on, and with another one on what they leave."""
        narrow = self._narrow_convolutions()
        fastest = self._fastest(2)
        slow = [item for item in self._fastest(len(SCHEMES)) if item not in fastest and not self._is_no_slower(item[1])]
        for candidate, measured in [*fastest, *slow]:
            quantized = [node for node in measured.nodes if node.quantized]
            operators = {node.operator for node in quantized}
            left_out = sorted(operators) if (candidate, measured) in fastest else ["Conv"] if "Conv" in operators else []
            for operator in left_out if len(operators) > 1 else ():
                kept = [node for node in quantized if node.operator != operator]
                if operator != "Gather" and any(node.operator != "Gather" for node in kept):  # tables cost no time
                    part = replace(candidate.parts[0], nodes=frozenset(node.node for node in kept))
                    yield Candidate(f"{candidate.label} without {operator}", (part,))
            wide = frozenset(node.node for node in quantized) - narrow
            takes_activations = self._scheme(candidate.parts[0].scheme).needs_calibration
            if (
                takes_activations
                and len(wide) < len(quantized)
                and any(node.operator == "Conv" for node in quantized if node.node in wide)
            ):
                label = f"{candidate.label} without convolutions of under {_NARROW} channels"
                yield Candidate(label, (replace(candidate.parts[0], nodes=wide),))
        for candidate, measured in self._fastest(3):
            taken = {node.node for node in measured.nodes if node.quantized}
            others = [item for item in self._fastest(len(SCHEMES)) if item[0].parts[0].scheme != candidate.parts[0].scheme]
            for other, found in others[:3]:
                rest = frozenset(node.node for node in found.nodes if node.quantized) - taken
                if rest and self._share(found, rest) >= _WORTH_STORING and self._is_no_slower(found):
                    part = replace(other.parts[0], nodes=rest)
                    yield Candidate(f"{candidate.label} + {other.label}", (*candidate.parts, part))

    def _narrow_convolutions(self) -> frozenset[str]:
        found = set()
        graphs = self._bundle.manifest.graphs
        for name in graphs:
            model = quantizable(read_mapped(self._bundle.graph_path(name)))
            kernels = {tensor.name: tensor.dims for tensor in model.graph.initializer if len(tensor.dims) == 4}
            for node in model.graph.node:
                if node.op_type == "Conv" and node.input[1] in kernels and min(kernels[node.input[1]][:2]) < _NARROW:
                    found.add(f"{name}: {node.name}" if len(graphs) > 1 else node.name)
        return frozenset(found)

    def _pruned(self) -> Iterator[Candidate]:
        """The fastest that lose too much, without the nodes that cost most; those go to a scheme that does not."""
        for candidate, measured in self._fastest(2, good=False):
            labels = [node.node for node in measured.nodes if node.quantized]
            if self._preference.is_good(measured) or len(labels) < 2 or not self._is_no_slower(measured):
                continue
            self._progress(f"how much each of {len(labels)} nodes costs in {candidate.label}")
            part, stop = candidate.parts[0], lambda: not self._laboratory.has_time_for(1 + _LAST)
            errors = sensitivity(self._bundle, part, labels, self._calibration, stop=stop)
            self._errors |= errors
            ranked = sorted(errors, key=lambda label: -errors[label])
            count = _fewest_to_leave_out([errors[label] for label in ranked], self._allowed / max(measured.drop, 1e-9))
            while ranked and count < len(ranked):
                pruned = self._without(candidate, ranked[:count], ranked[count:])
                yield pruned
                if self._preference.is_good(self._laboratory.measure(pruned)):
                    break
                count *= 2

    def _without(self, candidate: Candidate, left: Sequence[str], kept: Sequence[str]) -> Candidate:
        label = f"{candidate.label} without {len(left)} {'node' if len(left) == 1 else 'nodes'}"
        part = replace(candidate.parts[0], nodes=frozenset(kept))
        for other, found in self._fastest(len(SCHEMES)):
            takes = frozenset(node.node for node in found.nodes if node.quantized) & frozenset(left)
            if takes and self._preference.is_good(found) and self._is_no_slower(found):
                return Candidate(f"{label} + {other.label}", (part, replace(other.parts[0], nodes=takes)))
        return Candidate(label, (part,))

    def _stored(self) -> Iterator[Candidate]:
        """The best so far with everything else in 16 bits."""
        whole_candidate = self._varied(self._scheme(_STORED[0]), _STORED[1])
        whole = self._laboratory.measure(whole_candidate)
        for candidate, measured in self._best()[:3]:
            if candidate.parts[-1].scheme in HALVES:
                continue
            rest = frozenset(node.node for node in whole.nodes if node.quantized)
            rest -= {node.node for node in measured.nodes if node.quantized}
            if rest and self._share(whole, rest) >= _WORTH_STORING:
                part = replace(whole_candidate.parts[0], nodes=rest)
                yield Candidate(f"{candidate.label} + fp16 stored", (*candidate.parts, part))

    # Judging

    def _is_no_slower(self, measured: Measured) -> bool:
        return self._budget.for_size or (measured.ratio.low or measured.ratio.median) <= 1.0

    def _ran(self) -> list[Tried]:
        return [(candidate, found) for candidate, found in self._laboratory.results.values() if found.problem is None]

    def _fastest(self, count: int, *, good: bool = True) -> list[Tried]:
        """Schemes alone that quantize, the fastest first; with `good` those within the budget of quality come first."""
        ran = [item for item in self._ran() if is_alone(item[0]) and item[0].parts[0].scheme not in HALVES]
        best = sorted(ran, key=lambda item: (good and not self._preference.is_good(item[1]), item[1].ratio.median))
        each = {item[0].parts[0].scheme: item for item in reversed(best)}  # the best of each scheme
        return [item for item in best if each[item[0].parts[0].scheme] is item][:count]

    def _best(self) -> list[Tried]:
        """All that may be within the budget, the best first."""
        original_us = self._laboratory.original_us
        return self._preference.ranked([item for item in self._ran() if self._preference.may_fit(item[1], original_us)])

    def _share(self, measured: Measured, labels: frozenset[str]) -> float:
        """Of all weights, how many these nodes have."""
        total = sum(node.weights for node in measured.nodes)
        return sum(node.weights for node in measured.nodes if node.node in labels) / max(1, total)

    def _scheme(self, name: str) -> Scheme:
        return scheme_for(name, self._bundle.manifest)

    # Ending

    def finish(self, target: str | Path, *, force: bool) -> SearchReport:
        """Race the best, and write the best of those that pass."""
        raced: list[tuple[Tried, QuantizeReport]] = []
        for finalists in self._finals():
            with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
                self._progress(f"the last race of {len(finalists)}: {', '.join(item.label for item, _ in finalists)}")
                made = [self._laboratory.built(item, _sub(folder, at), tried=False) for at, (item, _) in enumerate(finalists)]
                setting = self._laboratory.setting
                bundles = [item.bundle for item in made]
                speeds = measure_speeds(setting.bundle, bundles, setting.batch, setting.threads)
                entries = {
                    item[0].key: _Entry(
                        (item[0], replace(item[1], ratio=speed.ratio, bytes=one.bundle.graph_bytes)), one, speed
                    )
                    for item, one, speed in zip(finalists, made, speeds, strict=True)
                }
                quick = replace(setting.quality, details=None)
                raced += [(entry.tried, self._report(entry, quick)) for entry in entries.values()]
                for winner in self._winners(raced, entries):
                    report = self._report(winner, setting.quality)
                    if report:
                        write_made(setting.bundle, winner.made, report, target, force=force)
                        return self._search_report(winner.tried[0], report, [tried[1] for tried, _ in raced])
                    raced = [(tried, report if tried[0].key == winner.tried[0].key else known) for tried, known in raced]
        if not raced:
            raise QuantizationRefused(self._nothing_fits())
        nearest = min(raced, key=lambda item: self._preference.miss(item[0][1], self._laboratory.original_us))
        raise QuantizationRefused(
            f"nothing of {len(raced)} passed the last race; the nearest miss is {nearest[0][0].label}: "
            f"{'; '.join(nearest[1].refusals)}. Measured: {nearest[1].figures()}"
        )

    def _winners(self, raced: list[tuple[Tried, QuantizeReport]], entries: Mapping[str, _Entry]) -> Iterator[_Entry]:
        """Those that passed, the best first, each with the quality of what will be written: the search measured another build,
        perhaps in an earlier process."""
        quality = self._laboratory.setting.quality
        for candidate, found in self._preference.ranked([tried for tried, report in raced if report]):
            entry = entries[candidate.key]
            score = quality.measure(entry.made.bundle)
            drop = quality.metric.drop(self._laboratory.score, score)
            yield replace(entry, tried=(candidate, replace(found, score=score, drop=drop)))

    def _finals(self) -> Iterator[list[Tried]]:
        """The best, with every scheme alone that may be the best of those; if none of them passes, the other schemes alone."""
        best = self._best()
        alone = [item for item in best if is_alone(item[0])]
        fastest = min(((found.ratio.high or found.ratio.median) for _, found in alone), default=0.0)
        rivals = [item for item in alone if (item[1].ratio.low or item[1].ratio.median) <= fastest]
        if self._budget.for_size:
            rivals = alone[:1]
        finalists = best[:_FINALISTS]
        finalists += [item for item in rivals[:_ALONE_IN_FINALS] if item not in finalists]
        while len(finalists) > 1 and not self._laboratory.has_time_for(_LAST * len(finalists) / 2):
            finalists.pop()
            self._complete = False
        if finalists:
            yield finalists
        if others := [item for item in alone if item not in finalists]:
            yield others

    def _report(self, entry: _Entry, quality: Quality) -> QuantizeReport:
        setting, (candidate, found) = self._laboratory.setting, entry.tried
        parts = candidate.parts
        return judged(
            setting.bundle,
            entry.made,
            parts,
            parts[0].scheme if len(parts) == 1 else MIXED,
            _changed(setting.bundle, parts[0]) if len(parts) == 1 else {},
            entry.speed,
            quality,
            (self._laboratory.score, found.score),
            self._budget,
        )

    def _nothing_fits(self) -> str:
        ran = [found for _, found in self._ran()]
        if not ran:
            return f"no scheme can be applied: {self._problems()}"
        nearest = min(ran, key=lambda found: self._preference.miss(found, self._laboratory.original_us))
        metric = self._laboratory.setting.quality.metric.name
        untried = self._untried()
        late = f"; time was up before these were tried: {', '.join(untried)}; give it more with --time" if untried else ""
        return (
            f"nothing of {len(ran)} that were measured is within the budget; the nearest miss is {nearest.label}: "
            f"{nearest.bytes:,} bytes, latency x{nearest.ratio}, {metric} drop {nearest.drop:.2f} "
            f"(allowed {self._allowed:g}); raise the budget, or use --for-size if only size matters{late}"
        )

    def _problems(self) -> str:
        """Each problem once, with the candidates that met it."""
        met: dict[str, list[str]] = {}
        for found in self._tried():
            problem = (found.problem or "").removeprefix(f"{found.label.partition(' ')[0]} ")
            met.setdefault(problem, []).append(found.label)
        return "; ".join(f"{', '.join(labels)}: {problem}" for problem, labels in met.items())

    def _tried(self) -> tuple[Measured, ...]:
        """All that was measured, and what could not be for want of samples."""
        left = [Measured(name, problem=_WANTS_SAMPLES) for name in _LIKELIEST_FIRST if self._lacks_samples(name)]
        return *(found for _, found in self._laboratory.results.values()), *left

    def _untried(self) -> tuple[str, ...]:
        """Schemes that time was up before."""
        begun = {candidate.parts[0].scheme for candidate, _ in self._laboratory.results.values()}
        if _STORED[0] in begun:
            begun.add("bf16")  # it is tried where storing fp16 fails
        return () if self._complete else tuple(name for name in self._applicable() if name not in begun)

    def _search_report(self, chosen: Candidate, report: QuantizeReport, raced: Sequence[Measured]) -> SearchReport:
        tried = self._tried()
        nodes = tuple(replace(node, reason=self._reason(node)) for node in report.nodes)
        parts = tuple(
            {"scheme": part.scheme, "settings": asdict(part.settings), "nodes": None if part.nodes is None else len(part.nodes)}
            for part in chosen.parts
        )
        return SearchReport(
            tried=tried,
            front=front(tried),
            chosen=chosen.label,
            parts=parts,
            nodes=nodes,
            report=report,
            raced=tuple(raced),
            recalled=self._laboratory.recalled,
            complete=self._complete,
            untried=self._untried(),
        )

    def _reason(self, node: NodeDecision) -> str:
        error = self._errors.get(node.node)
        cost = "" if error is None else f"; alone it changes the answer by {100 * error:.2g} %"
        if not node.quantized:
            return f"{node.reason}{cost}"
        return f"{node.scheme} was best by measurement{cost}"


@dataclass(frozen=True)
class _Entry:
    """One in the last race."""

    tried: Tried
    made: Made
    speed: Speed


def _fewest_to_leave_out(errors: Sequence[float], share: float) -> int:
    """How many of the largest errors to drop until this share of the whole error is left, if they add up as squares."""
    if not all(error < float("inf") for error in errors):
        return max(1, sum(error == float("inf") for error in errors))
    left = sum(error**2 for error in errors)
    allowed, count = left * share**2, 0
    for error in errors:
        if left <= allowed:
            break
        left -= error**2
        count += 1
    return max(1, count)


def front(tried: Sequence[Measured]) -> tuple[str, ...]:
    """Those that nothing beats in one of size, latency and drop without losing in another."""
    ran = [found for found in tried if found.problem is None and isfinite(found.drop)]

    def beats(one: Measured, other: Measured) -> bool:
        ours, theirs = ((item.bytes, item.ratio.median, item.drop) for item in (one, other))
        return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))

    return tuple(found.label for found in ran if not any(beats(other, found) for other in ran))


def _changed(bundle: Bundle, part: Part) -> dict[str, Any]:
    return changed_settings(scheme_for(part.scheme, bundle.manifest).settings, part.settings)


def _sub(folder: str, number: int) -> Path:
    path = Path(folder) / str(number)
    path.mkdir()
    return path
