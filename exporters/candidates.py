"""Candidates: ways to quantize a bundle, each built and measured once.

What was measured is written down after every candidate, so that a search that was cut short goes on where it stopped: the same
bundle, judged in the same way on the same machine, is not measured twice. What failed is tried again.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from runtime.bench import TURN_SECONDS, bundle_variant
from runtime.bench_worker import Worker, one_round
from runtime.bundle import Bundle
from runtime.errors import EdgekitError, QuantizationRefused
from runtime.machine import describe_machine
from runtime.statistics import FEWEST, Estimate, estimate, median, undisturbed

from .journal import Journal
from .quantize import Made, Quality, built
from .quantized_graphs import Part
from .quantizers.scheme import Calibration, NodeDecision
from .race import past_of

_ROUNDS = (FEWEST, 25)  # of a race: at least, and at most
_RACE_SECONDS = 3.0  # after which a race with slow calls ends
_PATIENCE = 3  # times as many rounds, and as long, while something slows the machine
_HOPELESS = 1.5  # so much slower that nothing more is asked
_UNKNOWN = Estimate(1.0, None, None)


@dataclass(frozen=True)
class Candidate:
    label: str
    parts: tuple[Part, ...]

    @property
    def key(self) -> str:
        """Two candidates with the same key are the same graphs."""
        return json.dumps([_part_json(part) for part in self.parts])


def _part_json(part: Part) -> list[Any]:
    settings = None if part.settings is None else asdict(part.settings)
    return [part.scheme, settings, part.only, part.exclude, None if part.nodes is None else sorted(part.nodes)]


@dataclass(frozen=True)
class Measured:
    """What came of a candidate; with a `problem` there is nothing else to know."""

    label: str
    bytes: int = 0
    ratio: Estimate = _UNKNOWN  # of its latency to the original's
    score: float = 0.0
    drop: float = 0.0
    nodes: tuple[NodeDecision, ...] = ()
    problem: str | None = None
    seconds: float = 0.0  # that it took to find out

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measured:
        numbers = {key: float(data[key]) for key in ("score", "drop", "seconds")}
        ends = (None if data["ratio"][end] is None else float(data["ratio"][end]) for end in ("low", "high"))
        ratio = Estimate(float(data["ratio"]["median"]), *ends)
        nodes = tuple(NodeDecision(**node) for node in data["nodes"])
        return cls(**{**data, **numbers, "bytes": int(data["bytes"]), "ratio": ratio, "nodes": nodes})


@dataclass(frozen=True)
class Setting:
    """How candidates are judged."""

    bundle: Bundle
    quality: Quality
    calibration: Calibration | None
    batch: int
    counts: tuple[int, ...]  # of threads; on the first, the original's best, quick races are run
    for_size: bool

    def fingerprint(self) -> dict[str, Any]:
        machine = describe_machine()
        return {
            "on": [machine[name] for name in ("cpu", "available_cores", "onnxruntime")],
            "files": {name: entry["sha256"] for name, entry in self.bundle.manifest.files.items()},
            "metric": [self.quality.metric.name, self.quality.data, self.quality.samples],
            "batch": self.batch,
            "threads": sorted(self.counts),
            "for_size": self.for_size,
        }


class Laboratory:
    """Measures candidates, and remembers."""

    def __init__(
        self, setting: Setting, *, journal: Path, deadline: float | None = None, progress: Callable[[str], None]
    ) -> None:
        self.setting, self._progress = setting, progress
        self._journal = Journal(journal, setting.fingerprint())
        self._known = _recalled(self._journal)
        self.recalled = len(self._known)
        self._deadline = deadline  # by time.monotonic()
        self._longest = max((found.seconds for found in self._known.values()), default=0.0)  # that a candidate took
        self._original: Worker | None = None  # one process for all races: loading a network takes long
        self.original_us: float | None = None  # its latency in the last race
        self._originals: list[float] = []  # its latencies in all races
        self.score = setting.quality.measure(setting.bundle)
        self.results: dict[str, tuple[Candidate, Measured]] = {}  # of this search, by key

    def has_time_for(self, candidates: float) -> bool:
        """Whether so many could still be measured, by the longest so far."""
        return self._deadline is None or time.monotonic() + candidates * self._longest < self._deadline

    def measure(self, candidate: Candidate) -> Measured:
        key = candidate.key
        if key in self.results:
            return self.results[key][1]
        found = self._known.get(key)
        if found is None:
            self._progress(f"trying {candidate.label}")
            started = time.monotonic()
            found = self._measured(candidate)
            found = self._known[key] = replace(found, seconds=time.monotonic() - started)
            self._longest = max(self._longest, found.seconds)
            self._journal.write({key: found.to_json() for key, found in self._known.items() if found.problem is None})
        self.results[key] = (candidate, found)
        return found

    def _measured(self, candidate: Candidate) -> Measured:
        setting = self.setting
        self.start_original()
        with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
            try:
                made = self.built(candidate, Path(folder))
                ratio = self.race(made.bundle)
                score = setting.quality.measure(made.bundle)
            except EdgekitError as error:
                return Measured(candidate.label, problem=" ".join(str(error).split()))
            drop = setting.quality.metric.drop(self.score, score)
            return Measured(candidate.label, made.bundle.graph_bytes, ratio, score, drop, made.nodes)

    def built(self, candidate: Candidate, folder: Path, *, tried: bool | None = None) -> Made:
        """Where there is one graph, racing it tells whether it can be run."""
        setting = self.setting
        several = len(setting.bundle.manifest.graphs) > 1 if tried is None else tried
        return built(
            setting.bundle, candidate.parts, setting.calibration, setting.counts[0], folder, setting.for_size, tried=several
        )

    def start_original(self) -> None:
        """If it does not run. What it cannot do, such as a batch of another size, is no fault of a candidate."""
        if self._original is None:
            self._original = self._worker("original", self.setting.bundle)

    def race(self, bundle: Bundle) -> Estimate:
        """Its latency as a ratio to the original's, in turns: as many as tell whether it deserves the last race."""
        assert self._original is not None
        try:
            candidate = self._worker("candidate", bundle)
        except EdgekitError as error:
            raise QuantizationRefused(f"it is a graph that onnxruntime cannot run: {error}") from error
        try:
            return self._raced(self._original, candidate)
        except BaseException:
            self.close()
            raise
        finally:
            candidate.close()

    def _worker(self, name: str, bundle: Bundle) -> Worker:
        setting = self.setting
        worker = Worker(bundle_variant(bundle.root, name=name, threads=setting.counts[0], past=past_of(setting.bundle)))
        worker.prepare(setting.batch)
        return worker

    def _raced(self, original: Worker, candidate: Worker) -> Estimate:
        ratios: list[float] = []
        originals: list[float] = []
        started = time.monotonic()
        quiet: list[float] = []
        while len(quiet) < _ROUNDS[1] and len(ratios) < _PATIENCE * _ROUNDS[1]:
            late = time.monotonic() - started
            enough = len(quiet) >= _ROUNDS[0] and (late > _RACE_SECONDS or (estimate(quiet).low or 0.0) > _HOPELESS)
            if enough or (len(ratios) >= _ROUNDS[0] and late > _PATIENCE * _RACE_SECONDS):
                break
            turns = (original, candidate) if len(ratios) % 2 else (candidate, original)
            taken = {name: median(turn) for name, turn in one_round(turns, TURN_SECONDS).items()}
            ratios.append(taken[candidate.variant.name] / taken[original.variant.name])
            originals.append(taken[original.variant.name] / 1000)
            quiet = [ratio for ratio, is_quiet in zip(ratios, undisturbed(originals, self._originals), strict=True) if is_quiet]
        self._originals += originals
        self.original_us = median(originals)
        return estimate(quiet if len(quiet) >= _ROUNDS[0] else ratios)

    def close(self) -> None:
        if self._original is not None:
            self._original.close()
            self._original = None

    def forget(self) -> None:
        """The search has ended: nothing is left to go on with."""
        self._journal.forget()


def _recalled(journal: Journal) -> dict[str, Measured]:
    try:
        return {key: Measured.from_json(found) for key, found in journal.measured.items()}
    except (AttributeError, KeyError, TypeError, ValueError):  # somebody changed it
        return {}
