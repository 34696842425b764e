"""`--scheme auto`: which scheme on which nodes, found by measuring.

    alone      every scheme on all that it can take, with its settings varied where it misses the budget of quality
    together   the fastest of them, with the nodes that it cannot take, or is slower on, left to the others
    pruned     where quality misses the budget: without the nodes that cost most (sensitivity.py), first one, then two, four …
    stored     whatever is still in float32, stored in 16 bits, which costs no time
    finals     the best few in one race with the original; the first that passes the same gate as any scheme is written

The best is the fastest within the budget; among those as fast, the smallest. With `for_size` it is the smallest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from architectures.settings import apply_settings, changed_settings
from runtime.bundle import Bundle
from runtime.errors import QuantizationRefused

from .candidates import Candidate, Laboratory, Measured, Setting
from .quantize import MIXED, Budget, MeasuredRefusal, Quality, QuantizeReport, built, quantize_parts, refuse_bundle, timed_batch
from .quantized_graphs import Part
from .quantizers import SCHEMES, scheme_for
from .quantizers.scheme import HALVES, Calibration, NodeDecision, Scheme
from .sensitivity import sensitivity

AUTO = "auto"
_EQUALLY_FAST = 1.03  # a race cannot tell these apart
_EQUALLY_SMALL = 1.005
_FINALISTS = 4
_WORTH_STORING = 0.01  # of all weights
_VARIED: dict[str, tuple[dict[str, Any], ...]] = {  # settings tried when a scheme's own miss the budget of quality
    "int8-static": ({"ranges": "percentile"}, {"ranges": "mse"}),
    "int4-weights": ({"rounding": "hqq"}, {"block": 32}),
}
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
    recalled: int = 0  # measured before, in a search that was cut short
    complete: bool = True  # False: time was up before everything had been tried

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
    journal = Path(f"{target}.search.json")
    laboratory = Laboratory(setting, journal=journal, seconds=seconds, progress=progress)
    searcher = _Searcher(laboratory, budget, progress)
    searcher.run()
    ranked = searcher.finals()
    if not ranked:
        raise QuantizationRefused(searcher.nothing_fits())
    refusals = []
    for candidate in ranked:
        try:
            report = quantize_parts(
                bundle,
                target,
                candidate.parts,
                scheme=candidate.parts[0].scheme if len(candidate.parts) == 1 else MIXED,
                settings=_changed(bundle, candidate.parts[0]) if len(candidate.parts) == 1 else {},
                quality=quality,
                calibration=calibration,
                budget=budget,
                batch=batch,
                threads=threads,
                force=force,
                progress=progress,
            )
        except MeasuredRefusal as refusal:
            refusals.append(str(refusal))
            continue
        laboratory.forget()
        return searcher.report(candidate, report)
    raise QuantizationRefused(f"nothing passed its last measurement; the nearest: {refusals[0]}")


class _Searcher:
    def __init__(self, laboratory: Laboratory, budget: Budget, progress: Callable[[str], None]) -> None:
        self._laboratory, self._budget, self._progress = laboratory, budget, progress
        self._bundle = laboratory.setting.bundle
        self._calibration = laboratory.setting.calibration
        metric = laboratory.setting.quality.metric
        self._allowed = metric.default_budget if budget.max_drop is None else budget.max_drop
        self._errors: dict[str, float] = {}  # of nodes, where sensitivity was asked for
        self._complete = True

    # Trying

    def run(self) -> None:
        for stage in (self._alone, self._together, self._pruned, self._stored):
            for candidate in stage():
                if self._laboratory.time_is_up and self._laboratory.results:
                    self._complete = False
                    return
                self._laboratory.measure(candidate)

    def _alone(self) -> Iterator[Candidate]:
        for name in SCHEMES:
            scheme = self._scheme(name)
            if scheme.needs_calibration and self._calibration is None:
                continue
            first = Candidate(name, (Part(name, scheme.settings),))
            yield first
            if name == _STORED[0]:
                yield self._varied(scheme, _STORED[1])
            elif not self._is_good(self._laboratory.measure(first)):
                for settings in _VARIED.get(name, ()):
                    yield self._varied(scheme, settings)

    def _varied(self, scheme: Scheme, settings: Mapping[str, Any]) -> Candidate:
        text = ", ".join(f"{key}={value}" for key, value in settings.items())
        return Candidate(f"{scheme.name} ({text})", (Part(scheme.name, apply_settings(scheme.settings, settings)),))

    def _together(self) -> Iterator[Candidate]:
        """The fastest schemes without an operator that they are slow on, and with another one on what they leave."""
        for candidate, measured in self._fastest(2):
            operators = sorted({node.operator for node in measured.nodes if node.quantized})
            for operator in operators if len(operators) > 1 else ():
                kept = frozenset(node.node for node in measured.nodes if node.quantized and node.operator != operator)
                yield Candidate(f"{candidate.label} without {operator}", (replace(candidate.parts[0], nodes=kept),))
        for candidate, measured in self._fastest(2):
            taken = {node.node for node in measured.nodes if node.quantized}
            others = [item for item in self._fastest(len(SCHEMES)) if item[0].parts[0].scheme != candidate.parts[0].scheme]
            for other, found in others[:3]:
                rest = frozenset(node.node for node in found.nodes if node.quantized) - taken
                if rest and self._share(found, rest) >= _WORTH_STORING:
                    part = replace(other.parts[0], nodes=rest)
                    yield Candidate(f"{candidate.label} + {other.label}", (*candidate.parts, part))

    def _pruned(self) -> Iterator[Candidate]:
        """The fastest that lose too much, without the nodes that cost most."""
        for candidate, measured in self._fastest(2, good=False):
            labels = [node.node for node in measured.nodes if node.quantized]
            if self._is_good(measured) or len(candidate.parts) > 1 or len(labels) < 2:
                continue
            self._progress(f"how much each of {len(labels)} nodes costs in {candidate.label}")
            part, stop = candidate.parts[0], lambda: self._laboratory.time_is_up
            errors = sensitivity(self._bundle, part, labels, self._calibration, stop=stop)
            self._errors |= errors
            ranked = sorted(errors, key=lambda label: -errors[label])
            count = 1
            while ranked and count < len(ranked):
                kept = frozenset(ranked[count:])
                pruned = Candidate(f"{candidate.label} without {count} nodes", (replace(part, nodes=kept),))
                yield pruned
                if self._is_good(self._laboratory.measure(pruned)):
                    break
                count *= 2

    def _stored(self) -> Iterator[Candidate]:
        """The best so far with everything else in 16 bits."""
        scheme = self._scheme(_STORED[0])
        settings = apply_settings(scheme.settings, _STORED[1])
        whole = self._laboratory.measure(self._varied(scheme, _STORED[1]))
        for candidate in self._best(3):
            measured = self._laboratory.measure(candidate)
            if candidate.parts[-1].scheme in HALVES:
                continue
            rest = frozenset(node.node for node in whole.nodes if node.quantized)
            rest -= {node.node for node in measured.nodes if node.quantized}
            if rest and self._share(whole, rest) >= _WORTH_STORING:
                part = Part(scheme.name, settings, nodes=rest)
                yield Candidate(f"{candidate.label} + fp16 stored", (*candidate.parts, part))

    # Judging

    def _is_good(self, measured: Measured) -> bool:
        return measured.problem is None and measured.drop <= self._allowed

    def _fits(self, measured: Measured) -> bool:
        """Whether it is within the budget, as far as one quick race can tell."""
        budget = self._budget
        if not self._is_good(measured) or (budget.max_bytes is not None and measured.bytes > budget.max_bytes):
            return False
        return budget.for_size or (measured.ratio.low or measured.ratio.median) <= _EQUALLY_FAST

    def _ran(self) -> list[tuple[Candidate, Measured]]:
        return [(candidate, found) for candidate, found in self._laboratory.results.values() if found.problem is None]

    def _fastest(self, count: int, *, good: bool = True) -> list[tuple[Candidate, Measured]]:
        """Schemes alone that quantize, the fastest first; with `good` those within the budget of quality come first."""
        ran = [item for item in self._ran() if len(item[0].parts) == 1 and item[0].parts[0].nodes is None]
        ran = [item for item in ran if item[0].parts[0].scheme not in HALVES]
        best = sorted(ran, key=lambda item: (good and not self._is_good(item[1]), item[1].ratio.median))
        each = {item[0].parts[0].scheme: item for item in reversed(best)}  # the best of each scheme
        return [item for item in best if each[item[0].parts[0].scheme] is item][:count]

    def _best(self, count: int) -> list[Candidate]:
        fitting = [item for item in self._ran() if self._fits(item[1])]
        return [candidate for candidate, _ in sorted(fitting, key=self._order(fitting))][:count]

    def _order(self, among: Sequence[tuple[Candidate, Measured]]) -> Callable[[tuple[Candidate, Measured]], tuple[float, ...]]:
        """The fastest first, of equally fast ones the smallest; for size the other way round."""
        fastest = min((found.ratio.median for _, found in among), default=1.0)
        smallest = min((found.bytes for _, found in among), default=1)

        def order(item: tuple[Candidate, Measured]) -> tuple[float, ...]:
            found = item[1]
            fast, small = found.ratio.median / fastest, found.bytes / smallest
            if self._budget.for_size:
                return (0.0 if small <= _EQUALLY_SMALL else small, fast, found.drop)
            return (0.0 if fast <= _EQUALLY_FAST else fast, small, found.drop)

        return order

    def _share(self, measured: Measured, labels: frozenset[str]) -> float:
        """Of all weights, how many these nodes have."""
        total = sum(node.weights for node in measured.nodes)
        return sum(node.weights for node in measured.nodes if node.node in labels) / max(1, total)

    def _scheme(self, name: str) -> Scheme:
        return scheme_for(name, self._bundle.manifest)

    # Ending

    def finals(self) -> list[Candidate]:
        """The best few, raced together, the winner first; one scheme alone is always among them."""
        finalists = self._best(_FINALISTS)
        alone = next((item for item in self._best(len(self._ran())) if len(item.parts) == 1 and not item.parts[0].nodes), None)
        if alone is not None and alone not in finalists:
            finalists.append(alone)
        if len(finalists) < 2:
            return finalists
        self._progress(f"the last race of {len(finalists)}")
        setting = self._laboratory.setting
        with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
            made = [
                built(
                    setting.bundle, item.parts, setting.calibration, setting.threads, _sub(folder, number), setting.for_size
                ).bundle
                for number, item in enumerate(finalists)
            ]
            ratios = self._laboratory.race(made, rounds=35, launches=3)
        raced = [
            (item, replace(self._laboratory.measure(item), ratio=ratio)) for item, ratio in zip(finalists, ratios, strict=True)
        ]
        return [item for item, _ in sorted(raced, key=self._order(raced))]

    def nothing_fits(self) -> str:
        ran = [found for _, found in self._ran()]
        if not ran:
            problems = "; ".join(f"{found.label}: {found.problem}" for _, found in self._laboratory.results.values())
            return f"no scheme can be applied: {problems}"
        nearest = min(ran, key=self._miss)
        metric = self._laboratory.setting.quality.metric.name
        return (
            f"nothing of {len(ran)} that were measured is within the budget; the nearest miss is {nearest.label}: "
            f"{nearest.bytes:,} bytes, latency x{nearest.ratio}, {metric} drop {nearest.drop:.2f} "
            f"(allowed {self._allowed:g}); raise the budget, or use --for-size if only size matters"
        )

    def _miss(self, found: Measured) -> float:
        misses = [max(0.0, found.drop - self._allowed) / max(self._allowed, 0.1)]
        if self._budget.max_bytes is not None:
            misses.append(max(0.0, found.bytes / self._budget.max_bytes - 1))
        if not self._budget.for_size:
            misses.append(max(0.0, found.ratio.median - 1))
        return sum(misses)

    def report(self, chosen: Candidate, report: QuantizeReport) -> SearchReport:
        tried = tuple(found for _, found in self._laboratory.results.values())
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
            recalled=self._laboratory.recalled,
            complete=self._complete,
        )

    def _reason(self, node: NodeDecision) -> str:
        error = self._errors.get(node.node)
        cost = "" if error is None else f"; alone it changes the answer by {100 * error:.2g} %"
        if not node.quantized:
            return f"{node.reason}{cost}"
        return f"{node.scheme} was best by measurement{cost}"


def front(tried: Sequence[Measured]) -> tuple[str, ...]:
    """Those that nothing beats in one of size, latency and drop without losing in another."""
    ran = [found for found in tried if found.problem is None]

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
