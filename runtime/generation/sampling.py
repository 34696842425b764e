"""Drawing a token: first the candidates are restricted, then a number from 0 to 1 chooses among them.

top_k   the k likeliest
top_p   the fewest of the likeliest that together have this probability (Holtzman et al., "The curious case of neural
        text degeneration", 2020)
min_p   those with at least this share of the likeliest's probability (Nguyen et al., "Turning up the heat", 2024)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..errors import GenerationError
from .numeric import log_sum_exp, top
from .options import Options

Scores = NDArray[np.float32]

_COLDEST = 1e-30  # log-probabilities divided by less leave float32; at this temperature the likeliest already has all
_FIRST_LOOK = 64  # tokens that usually have top_p; eight times as many are looked at when they do not


def restrict(scores: Scores, options: Options) -> None:
    """Divides the log-probabilities (vocabulary,) by the temperature and bans all that are not to be drawn, in place.

    In the order top_k, top_p, min_p, each of what the one before left. The likeliest token always stays.
    """
    scores /= max(options.temperature, _COLDEST)
    if options.top_k is not None and options.top_k < len(scores):
        values, ids = top(scores[None], options.top_k)
        _keep(scores, values[0], ids[0])
    if options.top_p is not None and options.top_p < 1:
        _keep_probable(scores, options.top_p)
    if options.min_p:
        scores[scores < scores.max() + math.log(options.min_p)] = -np.inf


def draw(scores: Scores, uniform: float) -> int:
    """The token at `uniform` (0 ≤ uniform < 1) of the cumulative softmax of `scores` (vocabulary,)."""
    possible = np.flatnonzero(scores > -np.inf)
    if possible.size == 0:
        raise GenerationError("no token is allowed next; loosen the constraint, bad_words, no_repeat_ngram or min_new_tokens")
    kept = scores[possible]
    reached = np.cumsum(np.exp(kept - kept.max()), dtype=np.float64)
    place = reached.searchsorted(uniform * reached[-1], side="right")  # "right" passes over tokens of probability 0
    last = reached.searchsorted(reached[-1])  # where rounding makes the product the whole sum
    return int(possible[min(place, last)])


def _keep(scores: Scores, values: Scores, ids: NDArray[np.int64]) -> None:
    scores.fill(-np.inf)
    scores[ids] = values


def _keep_probable(scores: Scores, probability: float) -> None:
    """Sorting only as many as are needed."""
    if scores.max() == -np.inf:
        return
    total = float(log_sum_exp(scores[None])[0])
    look = _FIRST_LOOK
    while True:
        values, ids = top(scores[None], look)
        reached = np.cumsum(np.exp(values[0].astype(np.float64) - total))
        if reached[-1] >= probability or len(reached) < look:
            break
        look *= 8
    count = int(reached.searchsorted(probability)) + 1
    _keep(scores, values[0, :count], ids[0, :count])
