"""One process of a benchmark: the parent's side of it (`Worker`) and its own (`serve`).

A worker reads one JSON request a line and answers with one JSON line:
    {"open": {...}}                        → {"load_ms", "baseline_bytes", "device", "inputs"}
    {"prepare": batch or null}             → {"call_ms"}           builds the feeds (null: the natural batch) and warms up
    {"turn": seconds, "warmup": n}         → {"ns": [latency of each call]}
    {"memory": true}                       → {"peak_bytes"}
    anything that fails                    → {"error": text}

Between its turns a worker is stopped, where the system can: the threads of onnxruntime and PyTorch spin for tens of
milliseconds after a call, on a core that the next one needs. Workers of one thread follow the first of a round to its core: the
cores of a shared machine differ by a quarter, and trade places within seconds (decision 0019).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from .errors import EdgekitError
from .machine import peak_resident_bytes, resident_bytes

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_CAN_STOP = hasattr(os, "waitid")  # Linux and most of Unix
_OWN_GROUP = 0 if os.name == "posix" else None  # a terminal sends Ctrl-C to the parent alone then
_CORES = os.sched_getaffinity(0) if sys.platform == "linux" else frozenset[int]()
_CORE_IN_STAT = 36  # among the fields of proc(5)'s stat after the name
_SETTLE_SECONDS = 0.0 if _CAN_STOP else 0.005  # a pause before every turn, in which others may stop spinning
# A process that has waited finds its memory outside the caches: calls of some milliseconds need as many to be themselves.
_WARM_MS = 50
_FEWEST_CALLS, _LONGEST_TURN = 5, 0.3  # in a turn, if they take no longer than so many seconds
_LONG_MS = 1000  # a call that takes longer has filled the caches again long before it ends: it needs no warm-up in its turn


class Target(Protocol):
    """What a worker times."""

    device: str
    inputs: str  # the shapes it is timed on, e.g. "pixels[batch, 1, 8, 8]"

    def prepare(self, batch: int | None) -> Callable[[], object]:
        """The call to time at a batch size; None is the natural one."""


@dataclass(frozen=True)
class Variant:
    """Something to time: the module that runs it, and what that worker is told to open."""

    name: str
    module: str
    request: Mapping[str, Any]
    file_bytes: int | None = None
    python: str = sys.executable  # the interpreter of its process, where it needs another environment


@dataclass(frozen=True)
class Footprint:
    """What a variant costs before its first answer. Memory and load time come from a fresh process."""

    variant: str
    device: str  # the one that was really used
    inputs: str  # the shapes it was timed on
    file_bytes: int | None
    load_ms: float
    cold_start_ms: float  # from starting the process to its first answer
    peak_bytes: int
    model_bytes: int  # peak minus what the process held before the model was opened


class Worker:
    """The parent's side of one worker process: opened and warmed up at the natural batch when it is made."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self._can_move = bool(_CORES) and variant.request.get("threads") == 1
        home = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [variant.python, "-P", "-m", variant.module, "bench-worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
            process_group=_OWN_GROUP,
        )
        try:
            self._opened = self._ask({"open": dict(variant.request)})
            self.prepare(None)
        except BaseException:
            self.close()
            raise
        self._cold_start_ms = (time.perf_counter() - started) * 1000

    def prepare(self, batch: int | None) -> None:
        call_ms = self._ask({"prepare": batch})["call_ms"]
        self._warmup = 0 if call_ms > _LONG_MS else 3 if call_ms <= 5 else math.ceil(_WARM_MS / call_ms)

    def turn(self, seconds: float, core: int | None = None) -> list[int]:
        """The latency of each call in nanoseconds; a worker of one thread runs on `core`, if one is given."""
        time.sleep(_SETTLE_SECONDS)
        if self._can_move:
            with suppress(ProcessLookupError):  # it died just now: the request says so
                os.sched_setaffinity(self._process.pid, _CORES if core is None else {core})
        samples: list[int] = self._ask({"turn": seconds, "warmup": self._warmup})["ns"]
        return samples

    def core(self) -> int | None:
        """Where it ran last, if it has one thread and the system tells."""
        if not self._can_move:
            return None
        status = Path(f"/proc/{self._process.pid}/stat").read_text()
        return int(status.rpartition(")")[2].split()[_CORE_IN_STAT])

    def footprint(self) -> Footprint:
        peak = self._ask({"memory": True})["peak_bytes"]
        return Footprint(
            variant=self.variant.name,
            device=self._opened["device"],
            inputs=self._opened["inputs"],
            file_bytes=self.variant.file_bytes,
            load_ms=self._opened["load_ms"],
            cold_start_ms=self._cold_start_ms,
            peak_bytes=peak,
            model_bytes=max(0, peak - self._opened["baseline_bytes"]),
        )

    def close(self) -> None:
        self._go_on()
        for stream in (self._process.stdin, self._process.stdout):
            try:
                if stream:
                    stream.close()
            except OSError:
                pass
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        self._go_on()
        answer = self._answer(request)
        self._stop()
        return answer

    def _stop(self) -> None:
        if not _CAN_STOP:
            return
        self._process.send_signal(signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until all its threads are
        except ChildProcessError:  # it died just now: the next request says so
            pass

    def _go_on(self) -> None:
        if _CAN_STOP:
            self._process.send_signal(signal.SIGCONT)

    def _answer(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise EdgekitError(f"the benchmark process of {self.variant.name!r} died with exit code {code}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise EdgekitError(
                f"the benchmark process of {self.variant.name!r} answered {line[:80]!r}, expected JSON"
            ) from None
        if "error" in answer:
            raise EdgekitError(f"cannot benchmark {self.variant.name!r}: {answer['error']}")
        return answer


def one_round(workers: Sequence[Worker], seconds: float) -> dict[str, list[int]]:
    """A turn of each, by name: in this order, and on one core where each has one thread."""
    turns: dict[str, list[int]] = {}
    core: int | None = None
    for worker in workers:
        turns[worker.variant.name] = worker.turn(seconds, core)
        core = worker.core() if core is None else core
    return turns


def serve(open_target: Callable[[dict[str, Any]], Target]) -> None:
    """The worker's side: answer requests on stdin until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes our stdin
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr, not into the protocol
    session = _Turns(open_target)
    for line in sys.stdin:
        try:
            answer = session.answer(json.loads(line))
        except EdgekitError as error:
            answer = {"error": str(error)}
        except Exception as error:  # the parent must hear of it, whatever it was
            answer = {"error": f"{type(error).__name__}: {error}"}
        _reply(answers, answer)


def _die_with_parent() -> None:
    """Whoever is stopped does not see its stdin close: if the parent is killed, Linux is to kill this process too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _reply(stream: IO[str], answer: Mapping[str, Any]) -> None:
    try:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
    except BrokenPipeError:  # the parent is gone
        raise SystemExit(0) from None


class _Turns:
    def __init__(self, open_target: Callable[[dict[str, Any]], Target]) -> None:
        self._open_target = open_target
        self._target: Target | None = None
        self._call: Callable[[], object] | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "open" in request:
            baseline = resident_bytes()
            started = time.perf_counter()
            self._target = self._open_target(request["open"])
            elapsed = (time.perf_counter() - started) * 1000
            return {
                "load_ms": elapsed,
                "baseline_bytes": baseline,
                "device": self._target.device,
                "inputs": self._target.inputs,
            }
        if "prepare" in request:
            assert self._target
            self._call = self._target.prepare(request["prepare"])
            self._call()
            return {"call_ms": self._timed() / 1e6}
        if "turn" in request:
            assert self._call
            for _ in range(request["warmup"]):
                self._call()
            started = time.perf_counter()
            samples = [self._timed()]
            while (spent := time.perf_counter() - started) < request["turn"] or (
                len(samples) < _FEWEST_CALLS and spent < _LONGEST_TURN
            ):
                samples.append(self._timed())
            return {"ns": samples}
        return {"peak_bytes": peak_resident_bytes()}

    def _timed(self) -> int:
        assert self._call
        started = time.perf_counter_ns()
        self._call()
        return time.perf_counter_ns() - started
