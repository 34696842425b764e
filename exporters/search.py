"""`--scheme auto`: which scheme on which nodes, found by measuring.

Candidates are tried in quick races (exploration.py), and the best few, with every scheme alone that may be the best among them,
run in one more with the original and a copy of it.

The last race is the gate that any scheme has to pass, and the best of those that pass it is written (preference.py). So what is
written is never worse than a scheme alone that passed the same gate. If none of the best passes, every other scheme alone is
raced before anything is refused.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from architectures.settings import changed_settings
from runtime.bundle import Bundle
from runtime.errors import QuantizationRefused

from .candidates import Candidate, Laboratory, Measured, Setting
from .exploration import LAST, Exploration
from .preference import Preference, Tried, is_alone
from .quantize import Budget, Made, Quality, QuantizeReport, judged, refuse_bundle, write_made
from .quantized_graphs import Part
from .quantizers import scheme_for
from .quantizers.scheme import MIXED, Calibration, NodeDecision
from .race import Speed, measure_speeds, thread_counts, timed_batch

AUTO = "auto"
_FINALISTS = 4
_ALONE_IN_FINALS = 3


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
    threads: int | None,
    seconds: float | None = None,
    force: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> SearchReport:
    """Write the best mix within the budget at `target`; raise QuantizationRefused with the nearest miss if there is none."""
    refuse_bundle(bundle)
    deadline = None if seconds is None else time.monotonic() + seconds
    budget = budget or Budget()
    size = timed_batch(bundle) if batch is None else batch
    counts = thread_counts(bundle, size, threads)
    setting = Setting(bundle, quality, calibration, size, counts, budget.for_size)
    laboratory = Laboratory(setting, journal=_journal_of(target), deadline=deadline, progress=progress)
    preference = Preference(budget, budget.allowed_drop(quality.metric))
    exploration = Exploration(laboratory, preference, progress)
    try:
        exploration.run()
        laboratory.close()
        report = _Finals(exploration, laboratory, preference).finish(target, progress, force=force)
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


class _Finals:
    """The last race."""

    def __init__(self, exploration: Exploration, laboratory: Laboratory, preference: Preference) -> None:
        self._exploration, self._laboratory, self._preference = exploration, laboratory, preference
        self._is_complete = exploration.is_complete

    def finish(self, target: str | Path, progress: Callable[[str], None], *, force: bool) -> SearchReport:
        """Race the best, and write the best of those that pass."""
        raced: list[tuple[Tried, QuantizeReport]] = []
        for finalists in self._finals():
            with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
                progress(f"the last race of {len(finalists)}: {', '.join(item.label for item, _ in finalists)}")
                made = [self._laboratory.built(item, _sub(folder, at), tried=False) for at, (item, _) in enumerate(finalists)]
                setting = self._laboratory.setting
                bundles = [item.bundle for item in made]
                speeds = measure_speeds(setting.bundle, bundles, setting.batch, setting.counts)
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
                        try:
                            report = write_made(setting.bundle, winner.made, report, target, force=force)
                        except QuantizationRefused as refusal:  # by its answers to the goldens
                            report = replace(report, refusals=(str(refusal),))
                        else:
                            return self._search_report(winner.tried[0], report, [tried[1] for tried, _ in raced])
                    raced = [(tried, report if tried[0].key == winner.tried[0].key else known) for tried, known in raced]
        if not raced:
            raise QuantizationRefused(self._nothing_fits() + self._late())
        nearest = min(raced, key=lambda item: self._preference.miss(item[0][1], self._laboratory.original_us))
        raise QuantizationRefused(
            f"nothing of {len(raced)} passed the last race; the nearest miss is {nearest[0][0].label}: "
            f"{'; '.join(nearest[1].refusals)}. Measured: {nearest[1].figures()}{self._late()}"
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
        best = self._exploration.best()
        alone = [item for item in best if is_alone(item[0])]
        fastest = min(((found.ratio.high or found.ratio.median) for _, found in alone), default=0.0)
        rivals = [item for item in alone if (item[1].ratio.low or item[1].ratio.median) <= fastest]
        if self._preference.budget.for_size:
            rivals = alone[:1]
        finalists = best[:_FINALISTS]
        finalists += [item for item in rivals[:_ALONE_IN_FINALS] if item not in finalists]
        if finalists := self._as_many_as_time_is_for(finalists, at_least=1):
            yield finalists
        others = [item for item in alone if item not in finalists]
        if others := self._as_many_as_time_is_for(others, at_least=0):
            yield others

    def _as_many_as_time_is_for(self, finalists: list[Tried], at_least: int) -> list[Tried]:
        count = len(finalists)
        while count > at_least and not self._laboratory.has_time_for(LAST * count / 2):
            count -= 1
            self._is_complete = False
        return finalists[:count]

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
            self._preference.budget,
        )

    def _nothing_fits(self) -> str:
        ran = [found for _, found in self._exploration.ran()]
        if not ran:
            return f"no scheme can be applied: {self._problems()}"
        nearest = min(ran, key=lambda found: self._preference.miss(found, self._laboratory.original_us))
        metric = self._laboratory.setting.quality.metric.name
        size_alone = "" if self._preference.budget.for_size else ", or use --for-size if only size matters"
        return (
            f"nothing of {len(ran)} that were measured is within the budget; the nearest miss is {nearest.label}: "
            f"{nearest.bytes:,} bytes, latency x{nearest.ratio}, {metric} drop {nearest.drop:.2f} "
            f"({self._allowed()}); raise the budget{size_alone}"
        )

    def _allowed(self) -> str:
        """e.g. "allowed: drop 0.5, 2,000,000 bytes, latency x0.5"."""
        budget, limits = self._preference.budget, [f"drop {self._preference.allowed:g}"]
        limits += [] if budget.max_bytes is None else [f"{budget.max_bytes:,} bytes"]
        limits += [] if budget.max_ratio is None else [f"latency x{budget.max_ratio:g}"]
        limits += [] if budget.max_us is None else [f"{budget.max_us:g} µs"]
        return f"allowed: {', '.join(limits)}"

    def _late(self) -> str:
        if self._is_complete:
            return ""
        untried = self._exploration.untried()
        what = f"these were tried: {', '.join(untried)}" if untried else "everything was tried"
        return f"; time was up before {what}; give it more with --time"

    def _problems(self) -> str:
        """Each problem once, with the candidates that met it."""
        met: dict[str, list[str]] = {}
        for found in self._exploration.tried():
            problem = (found.problem or "").removeprefix(f"{found.label.partition(' ')[0]} ")
            met.setdefault(problem, []).append(found.label)
        return "; ".join(f"{', '.join(labels)}: {problem}" for problem, labels in met.items())

    def _search_report(self, chosen: Candidate, report: QuantizeReport, raced: Sequence[Measured]) -> SearchReport:
        tried = self._exploration.tried()
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
            complete=self._is_complete,
            untried=self._exploration.untried(),
        )

    def _reason(self, node: NodeDecision) -> str:
        error = self._exploration.errors.get(node.node)
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
