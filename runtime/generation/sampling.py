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
_FIRST_LOOK = 256  # tokens that usually have top_p; sixteen times as many are looked at when they do not
_RUN = 512  # tokens whose probabilities are added up together before the one that is drawn is searched among them


def restrict(scores: Scores, options: Options) -> None:
    """Divides the log-probabilities (vocabulary,) by the temperature and bans all that are not to be drawn, in place.

    In the order top_k, top_p, min_p, each of what the one before left. The likeliest token always stays.
    """
    scores /= max(options.temperature, _COLDEST)
    if options.top_k is not None and options.top_k < len(scores):
        values, ids = top(scores[None], options.top_k)
        _keep_probable(values[0], options)
        _keep(scores, values[0], ids[0])
    else:
        _keep_probable(scores, options)


def draw(scores: Scores, uniform: float) -> int:
    """The token at `uniform` (0 ≤ uniform < 1) of the cumulative softmax of `scores` (vocabulary,)."""
    largest = scores.max()
    if largest == -np.inf:
        raise GenerationError("no token is allowed next; loosen the constraint, bad_words, no_repeat_ngram or min_new_tokens")
    weights = scores - largest
    np.exp(weights, out=weights)
    reached = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _RUN), dtype=np.float64))
    # In float64 a product with less than 1 is never rounded up to the whole sum. "right" passes over what has probability 0.
    target = uniform * reached[-1]
    run = int(reached.searchsorted(target, side="right"))
    inside = np.cumsum(weights[run * _RUN : (run + 1) * _RUN], dtype=np.float64)
    place = inside.searchsorted(target - (reached[run - 1] if run else 0), side="right")
    last = inside.searchsorted(inside[-1])  # of the possible ones; the sums of a run may differ in their last bit
    return run * _RUN + int(min(place, last))


def _keep(scores: Scores, values: Scores, ids: NDArray[np.int64]) -> None:
    scores.fill(-np.inf)
    scores[ids] = values


def _keep_probable(scores: Scores, options: Options) -> None:
    """top_p and min_p."""
    largest = scores.max()
    if largest == -np.inf:
        return
    if options.top_p is not None and options.top_p < 1:
        _keep(scores, *_nucleus(scores, options.top_p))
    if options.min_p:
        scores[scores < largest + math.log(options.min_p)] = -np.inf


def _nucleus(scores: Scores, probability: float) -> tuple[Scores, NDArray[np.int64]]:
    """The fewest that together have the probability. Sorts only as many as are needed."""
    total = float(log_sum_exp(scores[None])[0])
    look = _FIRST_LOOK
    while True:
        values, ids = top(scores[None], look)
        reached = np.cumsum(np.exp(values[0].astype(np.float64) - total))
        if reached[-1] >= probability or look >= len(scores):
            break
        look *= 16
    count = int(reached.searchsorted(probability)) + 1
    return values[0, :count], ids[0, :count]
