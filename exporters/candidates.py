"""Candidates: ways to quantize a bundle, each built and measured once.

What was measured is written down after every candidate, so that a search that was cut short goes on where it stopped: the same
bundle, judged in the same way, is not measured twice.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.bench import bench, bundle_variant
from runtime.bundle import Bundle
from runtime.errors import EdgekitError
from runtime.statistics import Estimate

from .quantize import Quality, built, past_of
from .quantized_graphs import Part
from .quantizers.scheme import Calibration, NodeDecision

_ROUNDS = 25
_LAUNCHES = 1
JOURNAL_FORMAT = 1
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measured:
        nodes = tuple(NodeDecision(**node) for node in data["nodes"])
        return cls(**{**data, "ratio": Estimate(**data["ratio"]), "nodes": nodes})


@dataclass(frozen=True)
class Setting:
    """How candidates are judged."""

    bundle: Bundle
    quality: Quality
    calibration: Calibration | None
    batch: int
    threads: int
    for_size: bool

    def fingerprint(self) -> dict[str, Any]:
        return {
            "format": JOURNAL_FORMAT,
            "bundle": self.bundle.seal,
            "metric": [self.quality.metric.name, self.quality.data],
            "batch": self.batch,
            "threads": self.threads,
            "for_size": self.for_size,
        }


class Laboratory:
    """Measures candidates, and remembers."""

    def __init__(
        self, setting: Setting, *, journal: Path, seconds: float | None = None, progress: Callable[[str], None]
    ) -> None:
        self.setting, self._journal, self._progress = setting, journal, progress
        self._known = _read(journal, setting.fingerprint())
        self.recalled = len(self._known)
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.score = setting.quality.measure(setting.bundle)
        self.results: dict[str, tuple[Candidate, Measured]] = {}  # of this search, by key

    @property
    def time_is_up(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def measure(self, candidate: Candidate) -> Measured:
        key = candidate.key
        if key in self.results:
            return self.results[key][1]
        found = self._known.get(key)
        if found is None:
            self._progress(f"trying {candidate.label}")
            found = self._known[key] = self._measured(candidate)
            _write(self._journal, self.setting.fingerprint(), self._known)
        self.results[key] = (candidate, found)
        return found

    def _measured(self, candidate: Candidate) -> Measured:
        setting = self.setting
        with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
            try:
                made = built(
                    setting.bundle, candidate.parts, setting.calibration, setting.threads, Path(folder), setting.for_size
                )
                (ratio,) = self.race([made.bundle], rounds=_ROUNDS, launches=_LAUNCHES)
                score = setting.quality.measure(made.bundle)
            except EdgekitError as error:
                return Measured(candidate.label, problem=" ".join(str(error).split()))
            drop = setting.quality.metric.drop(self.score, score)
            return Measured(candidate.label, made.bundle.graph_bytes, ratio, score, drop, made.converted.nodes)

    def race(self, bundles: Sequence[Bundle], *, rounds: int, launches: int) -> list[Estimate]:
        """Their latencies as ratios to the original's, in turns."""
        setting = self.setting
        named = [("original", setting.bundle), *((f"candidate {number}", item) for number, item in enumerate(bundles))]
        variants = [
            bundle_variant(item.root, name=name, threads=setting.threads, past=past_of(setting.bundle)) for name, item in named
        ]
        report = bench(variants, batches=(setting.batch,), threads=setting.threads, rounds=rounds, launches=launches)
        ratios = [report.timing(name, setting.batch).ratio for name, _ in named[1:]]
        assert all(ratio is not None for ratio in ratios)
        return [ratio for ratio in ratios if ratio is not None]

    def forget(self) -> None:
        """The search has ended: nothing is left to go on with."""
        self._journal.unlink(missing_ok=True)


def _read(journal: Path, fingerprint: Mapping[str, Any]) -> dict[str, Measured]:
    try:
        written = json.loads(journal.read_text())
        if written["of"] != fingerprint:
            return {}
        return {key: Measured.from_json(found) for key, found in written["measured"].items()}
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is of another search
        return {}


def _write(journal: Path, fingerprint: Mapping[str, Any], known: Mapping[str, Measured]) -> None:
    aside = journal.with_name(f"{journal.name}.{os.getpid()}")
    aside.write_text(json.dumps({"of": fingerprint, "measured": {key: found.to_json() for key, found in known.items()}}))
    aside.replace(journal)
