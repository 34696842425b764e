"""A benchmark's worker between its turns, and when something kills it or its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.bench import bundle_variant
from runtime.bench_worker import Worker, one_round
from runtime.errors import EdgekitError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def worker(bundle: Path) -> Iterator[Worker]:
    worker = Worker(bundle_variant(bundle, threads=1))
    yield worker
    worker.close()


def state(pid: int) -> str:
    """The letter of proc(5): T is stopped; an empty text if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_a_worker_is_stopped_between_its_turns_and_ends_when_it_is_closed(worker: Worker) -> None:
    pid = worker._process.pid
    assert state(pid) == "T"
    for _ in range(3):
        assert min(worker.turn(0.001)) > 0
        assert state(pid) == "T"
    worker.close()
    assert state(pid) == ""
    assert worker._process.returncode == 0


def test_a_terminal_s_ctrl_c_does_not_reach_it_at_any_time(worker: Worker) -> None:
    pid = worker._process.pid
    assert os.getpgid(pid) == pid != os.getpgid(0)


def test_workers_of_one_thread_follow_the_first_of_a_round_to_its_core(bundle: Path) -> None:
    workers = [Worker(bundle_variant(bundle, name=str(number), threads=count)) for number, count in enumerate((1, 1, 2))]
    try:
        places = set()
        for _ in range(4):
            turns = one_round(workers, 0.001)
            assert list(turns) == ["0", "1", "2"]
            assert all(min(turn) > 0 for turn in turns.values())
            first, second, third = (os.sched_getaffinity(worker._process.pid) for worker in workers)
            assert workers[0].core() in second
            assert first == third == os.sched_getaffinity(0)
            places |= {frozenset(second)}
        assert {len(place) for place in places} == {1}
        assert workers[2].core() is None
    finally:
        for worker in workers:
            worker.close()


def test_a_worker_that_is_killed_between_its_turns_is_told_of_at_the_next(worker: Worker) -> None:
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(EdgekitError, match="the benchmark process of 'gemm' died with exit code -9"):
        worker.turn(0.001)


def test_a_stopped_worker_does_not_outlive_its_parent(bundle: Path) -> None:
    code = f"""
from runtime.bench import bundle_variant
from runtime.bench_worker import Worker
print(Worker(bundle_variant({str(bundle)!r}, threads=1))._process.pid, flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert state(pid) == "T"
        parent.kill()
    deadline = time.monotonic() + 10
    while state(pid) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert state(pid) in ("", "Z")
