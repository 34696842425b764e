"""Ranking: the likeliest tokens of every row with their log-probabilities, by onnxruntime itself.

Its kernels read the logits while they are still in a core's cache, on all threads, and one call costs less than the handful of
numpy's that it replaces. The graph is that of exporters/ranking_graph.py.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..session import Session
from ..signature import GraphSignature, TensorSpec
from .caches import value_of

_PATH = Path(__file__).with_name("ranking.onnx")
_SIGNATURE = GraphSignature(
    (TensorSpec("logits", "float32", ("rows", "vocabulary")), TensorSpec("count", "int64", (1,))),
    (TensorSpec("logprobs", "float32", ("rows", "kept")), TensorSpec("tokens", "int64", ("rows", "kept"))),
)


@cache
def _session(threads: int) -> Session:
    return Session(_PATH, _SIGNATURE, device="cpu", threads=threads, spins=False)


class Ranking:
    """Not shared between threads: it keeps what it bound last, which is what it is asked about again and again."""

    def __init__(self, threads: int) -> None:
        self._session = _session(threads)
        self._asked: tuple[Any, int] = (None, 0)  # about, last
        self._place: tuple[Any, ...] = ()  # where those logits are
        self._binding: Any = None
        self._held: tuple[Any, ...] = ()

    def best(self, logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Log-probabilities and tokens of the `count` likeliest of each row, (rows, count); of a smaller vocabulary all.

        Both are valid until the next call. A row's have the same bits alone and in any batch.
        """
        if self._asked[0] is not logits or self._asked[1] != count:
            place = (logits.__array_interface__["data"], logits.shape, logits.strides, count)
            if place != self._place:
                self._bind(np.ascontiguousarray(logits), min(count, logits.shape[1]))
                self._place = place if self._held[0] is logits else ()
            self._asked = (logits, count) if self._place else (None, 0)
        self._session.run_bound(self._binding)
        return self._held[1], self._held[2]

    def _bind(self, logits: NDArray[np.float32], count: int) -> None:
        logprobs = np.empty((len(logits), count), np.float32)
        tokens = np.empty((len(logits), count), np.int64)
        self._held = logits, logprobs, tokens
        self._binding = self._session.binding()
        self._binding.bind_ortvalue_input("logits", value_of(logits))
        self._binding.bind_ortvalue_input("count", value_of(np.array([count])))
        self._binding.bind_ortvalue_output("logprobs", value_of(logprobs))
        self._binding.bind_ortvalue_output("tokens", value_of(tokens))
