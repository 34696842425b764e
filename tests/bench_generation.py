"""How fast bundles generate, against the tools people use now: same shape, same precision, same number of tokens.

    python -m tests.bench_generation --work DIR --peer PYTHON [--only REGEX] [--rounds N]

Ours are bundles made by `edgekit export`, `optimize` and `quantize`, decoded by `runtime.load(…).generate(…)`. PYTHON is an
interpreter with the peers installed (`make bench-generation` makes one). Everyone has a process of its own, and within a round
they take turns in random order (runtime/bench.py). Figures are medians over the rounds. Who cannot be built or run is named
with the reason and left out. Prints ratios and writes bench-generation.json: a list of

    {shape, mode, precision, ours, peer, best_peer, ratio}

in tokens a second; words a second for letters → phonemes; milliseconds for the time to the first token, whose ratio is theirs
to ours, so that larger is better everywhere. REGEX is searched for in "shape/mode/precision", e.g. "A/greedy/8 bit".
Shapes A and B are described in bench_peer_models.py, g2p-* in bench_letters.py.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from runtime.bench_worker import Variant, Worker
from runtime.errors import EdgekitError
from runtime.machine import busy_share

from .bench_ours import LETTERS, RECIPES, bundle_of, environment
from .bench_peer_models import THREADS
from .bench_peers import FP32, INT4, INT8, PEERS, Job

OURS = "ours"
WORD_BY_WORD = "word by word"  # as a plain loop over a list does it
_STAND_INS = {peer.name for peer in PEERS if peer.stand_in}
_TURN_SECONDS = 0.5  # one call, of those that take longer
_BUSY = 0.2  # of all cores, by others
_HOST_GOALS = {1: 0.06, 4: 0.12}  # beams → largest share of a step outside the kernels


@dataclass(frozen=True)
class Contest:
    """One row of the result."""

    shape: str
    mode: str
    precision: str
    job: Job
    goal: float

    def __str__(self) -> str:
        return f"{self.shape}/{self.mode}/{self.precision}"

    @property
    def unit(self) -> str:
        if self.job.new_tokens == 1:
            return "ms"
        return "words/s" if self.shape in RECIPES else "tokens/s"

    def figure(self, seconds: float) -> float:
        """What is reported of a call's time."""
        if self.unit == "ms":
            return seconds * 1000
        return (self.job.batch if self.unit == "words/s" else self.job.tokens) / seconds


@dataclass(frozen=True)
class Result:
    contest: Contest
    seconds: Mapping[str, float]  # of a call, for ours and each peer that ran
    left_out: Mapping[str, str]  # name → reason

    def to_json(self) -> dict[str, Any] | None:
        """None where there is nothing to compare."""
        peers = {name: value for name, value in self.seconds.items() if name != OURS}
        if OURS not in self.seconds or not peers:
            return None
        best = min(peers, key=lambda name: peers[name])
        return {
            "shape": self.contest.shape,
            "mode": self.contest.mode,
            "precision": self.contest.precision,
            "ours": round(self.contest.figure(self.seconds[OURS]), 3),
            "peer": round(self.contest.figure(peers[best]), 3),
            "best_peer": best,
            "ratio": round(peers[best] / self.seconds[OURS], 3),
        }

    def lines(self) -> Iterator[str]:
        row = self.to_json()
        if row:
            verdict = "" if row["ratio"] >= self.contest.goal else "   MISSED"
            yield f"{self.contest!s:28} {row['ratio']:6.2f} of {row['best_peer']} (goal {self.contest.goal}){verdict}"
            if row["best_peer"] in _STAND_INS and (
                own := {k: v for k, v in self.seconds.items() if k not in (OURS, *_STAND_INS)}
            ):
                best = min(own, key=lambda name: own[name])
                yield f"{'':28} {own[best] / self.seconds[OURS]:6.2f} of {best}, the fastest that runs this very network"
            if single := [value for name, value in self.seconds.items() if WORD_BY_WORD in name]:
                yield f"{'':28} {min(single) / self.seconds[OURS]:6.2f} of PyTorch {WORD_BY_WORD}"
        else:
            yield f"{self.contest!s:28} nothing to compare"
        for name, seconds in sorted(self.seconds.items(), key=lambda item: item[1]):
            yield f"    {name:24} {self.contest.figure(seconds):9.1f} {self.contest.unit}"
        for name, reason in self.left_out.items():
            yield f"    {name:24} left out: {reason}"


def contests() -> Iterator[Contest]:
    """The goals are those of the issue that asked for this benchmark; see docs/guide-runtime.md."""
    for shape, mode, job, goals in (
        ("A", "greedy", Job("A", 1, 32, 128), {FP32: 0.95, INT8: 1.3, INT4: 1.25}),
        ("A", "beam4", Job("A", 1, 32, 128, beams=4), {FP32: 1.5, INT8: 2.5}),
        ("B", "greedy", Job("B", 1, 32, 64), {FP32: 1.4, INT8: 3.0}),
        ("B", "beam5", Job("B", 1, 32, 64, beams=5), {FP32: 1.45, INT8: 2.6}),
        ("B", "greedy-batch16", Job("B", 16, 32, 64), {FP32: 1.8, INT8: 1.6}),
        ("B", "beam5-batch16", Job("B", 16, 32, 64, beams=5), {FP32: 1.5, INT8: 1.15}),
        ("A", "first-token-512", Job("A", 1, 512, 1), {FP32: 1.0, INT8: 1.15}),
    ):
        for precision, goal in goals.items():
            yield Contest(shape, mode, precision, job, goal)
    for shape in RECIPES:
        for mode, batch, beams in (("greedy", 1, 1), ("beam4", 1, 4), ("greedy-batch16", 16, 1), ("beam4-batch16", 16, 4)):
            for precision in (FP32, INT8):  # against PyTorch in fp32: what its user has
                yield Contest(shape, mode, precision, Job(shape, batch, 8, 8, beams, words=LETTERS), 5.0)


# ---- taking turns


def hold(contest: Contest, work: Path, peer_python: str | None, rounds: int, seed: int = 0) -> Result:
    """Open everyone, and give each a turn in every round."""
    left_out: dict[str, str] = {}
    workers: list[Worker] = []
    samples: dict[str, list[float]] = {}
    shuffle = random.Random(seed)
    try:
        for name, variant in contestants(contest, work, peer_python):
            try:
                workers.append(Worker(variant()))
            except EdgekitError as error:
                left_out[name] = _one_line(error)
        for _ in range(rounds):
            for worker in shuffle.sample(workers, len(workers)):
                try:
                    samples.setdefault(worker.variant.name, []).append(median(worker.turn(_TURN_SECONDS)) / 1e9)
                except EdgekitError as error:
                    left_out[worker.variant.name] = _one_line(error)
                    workers.remove(worker)
                    worker.close()
    finally:
        for worker in workers:
            worker.close()
    return Result(contest, {name: median(each) for name, each in samples.items() if name not in left_out}, left_out)


def contestants(contest: Contest, work: Path, peer_python: str | None) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """Ours and the peers of this contest: each by name, and as a function, because what it needs may first have to be made."""
    job = asdict(contest.job)

    def ours() -> Variant:
        bundle = bundle_of(contest.shape, contest.precision, work)
        return Variant(OURS, "tests.bench_ours", {"bundle": str(bundle), "job": job})

    yield OURS, ours
    if contest.shape in RECIPES:
        for threads in range(1, THREADS + 1):  # networks as small as these may be faster on one
            for one_by_one in (False, True)[: contest.job.batch]:  # a plain loop takes a list of words one by one
                how = WORD_BY_WORD if one_by_one else "eager"
                name = f"PyTorch {how}, {threads} thread{'s' * (threads > 1)}"
                request = {"job": job, "threads": threads, "one_by_one": one_by_one}
                variant = Variant(name, "tests.bench_letters", request)
                yield name, lambda variant=variant: variant  # type: ignore[misc]
        return
    for peer in PEERS:
        if peer.takes(contest.job, contest.precision) and peer_python:
            request = {"peer": peer.name, "work": str(work), "job": job}
            variant = Variant(peer.name, "tests.bench_peers", request, python=peer_python)
            yield peer.name, lambda variant=variant: variant  # type: ignore[misc]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[-400:]


# ---- host time, and all of it


def host_lines(work: Path) -> Iterator[str]:
    for beams, goal in _HOST_GOALS.items():
        name = f"A/{'greedy' if beams == 1 else f'beam{beams}'}/{INT8}/host"
        try:
            bundle = bundle_of("A", INT8, work)
        except EdgekitError as error:
            yield f"{name:28} not measured: {error}"
            continue
        command = [sys.executable, "-m", "tests.bench_host", str(bundle), "--beams", str(beams)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
        if result.returncode:
            yield f"{name:28} not measured: {' '.join(result.stderr.split())[-300:]}"
            continue
        found = json.loads(result.stdout)
        verdict = "" if found["outside_kernels"] <= goal else "   MISSED"
        yield (
            f"{name:28} of a step of {found['step_ms']:.2f} ms {found['outside_run']:.1%} outside onnxruntime's calls, "
            f"{found['outside_kernels']:.1%} outside its kernels (goal {goal:.0%}){verdict}"
        )


def run(chosen: Sequence[Contest], arguments: argparse.Namespace) -> list[Result]:
    results = []
    for contest in chosen:
        busy = busy_share()
        if busy is not None and busy > _BUSY:
            print(f"others use {100 * busy:.0f} % of this machine; do not trust {contest}", file=sys.stderr)
        results.append(hold(contest, arguments.work, arguments.peer, arguments.rounds))
        print("\n".join(results[-1].lines()), flush=True)
        rows = [row for result in results if (row := result.to_json())]
        Path("bench-generation.json").write_text(json.dumps(rows, indent=1) + "\n")  # after each: it takes an hour
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast bundles generate, against the tools people use now.")
    parser.add_argument("--work", type=Path, default=Path("bench-work"), help="where models are built and kept")
    parser.add_argument(
        "--peer", help="python with the peers installed; without it only letters → phonemes has something to compare"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help='of "shape/mode/precision"')
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    arguments.work = arguments.work.absolute()
    arguments.work.mkdir(parents=True, exist_ok=True)
    results = run([contest for contest in contests() if re.search(arguments.only, str(contest))], arguments)
    if re.search(arguments.only, f"A/host/{INT8}"):
        print("\n".join(host_lines(arguments.work)))
    return 0 if all(OURS in result.seconds for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
