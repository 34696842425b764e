"""From how many rows on a decoder's form for many rows is the faster one. Measured on this machine, on steps of both."""

from __future__ import annotations

import time
from collections.abc import Callable

from runtime.bundle import DECODER, MANY, Bundle
from runtime.session import Session
from runtime.signature import GraphSignature
from runtime.state import TOKENS, step_feeds

ROWS = (2, 3, 4, 6, 8, 12, 16, 32)
_PAST = 8
_TURNS = 15
_SECONDS = 1.0  # for one number of rows, of large networks


def crossover(bundle: Bundle, threads: int) -> int | None:
    """The least of ROWS from which on `decoder.many` is always faster than `decoder`; None if it never is."""
    signature = bundle.manifest.graphs[DECODER].signature
    if not _takes_any_number_of_rows(signature):
        return None
    forms = [Session(bundle.graph_path(name), signature, device="cpu", threads=threads) for name in (DECODER, MANY)]
    longest = (bundle.manifest.generation or {}).get("longest") or _PAST + 1
    found: int | None = None
    for rows in reversed(ROWS):
        feeds = step_feeds(signature, rows, min(_PAST, longest - 1))
        few, many = _fastest([form.bind(feeds) for form in forms])
        if many >= few:
            break
        found = rows
    return found


def _takes_any_number_of_rows(signature: GraphSignature) -> bool:
    return any(spec.name == TOKENS and isinstance(spec.shape[0], str) for spec in signature.inputs)


def _fastest(runs: list[Callable[[], None]]) -> list[float]:
    """The best time of each, in seconds, taking turns: what disturbs a machine only ever adds time."""
    for run in runs:
        run()
    taken: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + _SECONDS
    while len(taken[0]) < _TURNS and (len(taken[0]) < 3 or time.perf_counter() < end):
        for run, times in zip(runs, taken, strict=True):
            start = time.perf_counter_ns()
            run()
            times.append((time.perf_counter_ns() - start) / 1e9)
    return [min(times) for times in taken]
