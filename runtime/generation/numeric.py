"""Numbers of a decoding step: log-probabilities and the likeliest tokens, in as few passes over the vocabulary as can be.

    log_softmax(x) = (x − max x) − log Σ exp(x − max x)

A row's result has the same bits alone and in any batch: nothing is added up across rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_CACHED = 1 << 17  # elements (512 KiB) that stay in a core's second cache, of the logits and of the scratch beside them
_MEMBERS = 32  # tokens of a block when the likeliest are searched: fewer make more maxima, more make more to look through
_LONG = 4096  # a vocabulary for which adding up in two steps is faster
_SMALLEST_IN_BLOCKS = _MEMBERS * (_MEMBERS - 1)  # below, the last members would be missing from all blocks
_BELOW_SIGN = np.int32(0x7FFFFFFF)


def log_softmax(logits: Floats) -> Floats:
    """Turns (rows, vocabulary) into log-probabilities in place, and returns it."""
    for block, scratch in _blocks(logits):
        np.subtract(block, _largest(block), out=block)
        block -= _log_sum_exp(block, scratch)
    return logits


def log_sum_exp(logits: Floats) -> Floats:
    """log Σ exp over the vocabulary: (rows, vocabulary) → (rows,). A logit minus this is its log-probability."""
    largest, logs = _largest_and_logs(logits)
    return largest + logs


def top(scores: Floats, k: int) -> tuple[Floats, Ids]:
    """The k largest of each row and their ids, largest first, of equals the smaller id first: (rows, k) each.

    A vocabulary smaller than k gives as many as it has.
    """
    rows, vocabulary = scores.shape
    k = min(k, vocabulary)
    if k == 1:
        best = scores.argmax(axis=1)
        return scores[np.arange(rows), best][:, None], best[:, None]
    width = -(-vocabulary // _MEMBERS)
    if vocabulary >= _SMALLEST_IN_BLOCKS and 2 * k <= width:
        return _top_through_blocks(scores, k, width)
    return _from_keys(_largest_keys(_keys(scores, np.arange(vocabulary)), k))


def _blocks(logits: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Some rows at a time, so that all passes but the first find them in the cache, with a scratch for as many.

    Of a long vocabulary the scratch has some more columns, of zeros, to be a multiple of `_MEMBERS`.
    """
    rows, vocabulary = logits.shape
    count = max(1, min(rows, _CACHED // vocabulary))
    width = vocabulary if vocabulary < _LONG else (vocabulary // _MEMBERS + 1) * _MEMBERS
    scratch = _scratch(count * width).reshape(count, width)
    scratch[:, vocabulary:] = 0
    for start in range(0, rows, count):
        block = logits[start : start + count]
        yield block, scratch[: len(block)]


class _Kept(threading.local):
    """A scratch for each thread: memory that was just got costs more time, page by page, than what is computed in it."""

    array: Floats = np.empty(0, np.float32)


_kept = _Kept()


def _scratch(size: int) -> Floats:
    if len(_kept.array) < size:
        _kept.array = np.empty(size, np.float32)
    return _kept.array[:size]


def _largest(block: Floats) -> Floats:
    """(rows, 1). Through arg-max, which numpy does faster than max."""
    largest: Floats = block[np.arange(len(block)), block.argmax(axis=1)][:, None]
    return largest


def _largest_and_logs(logits: Floats) -> tuple[Floats, Floats]:
    """max x and log Σ exp(x − max x) of each row, apart, because their sum would round what is far from zero: (rows,) each."""
    parts = np.empty((2, len(logits), 1), np.float32)
    start = 0
    for block, scratch in _blocks(logits):
        largest, logs = parts[:, start : start + len(block)]
        largest[:] = _largest(block)
        shifted = np.subtract(block, largest, out=scratch[:, : block.shape[1]])
        logs[:] = _log_sum_exp(shifted, scratch)
        start += len(block)
    return parts[0, :, 0], parts[1, :, 0]


def _log_sum_exp(shifted: Floats, scratch: Floats) -> Floats:
    """(rows, 1), of rows whose largest is 0."""
    rows, vocabulary = shifted.shape
    np.exp(shifted, out=scratch[:, :vocabulary])
    if scratch.shape[1] > vocabulary:  # long runs are added first: twice as fast as sum(), and as accurate
        scratch = np.add.reduce(scratch.reshape(rows, _MEMBERS, -1), axis=1)
    sums = np.add.reduce(scratch, axis=1, keepdims=True)
    return np.log(sums, out=sums)


def _top_through_blocks(scores: Floats, k: int, width: int) -> tuple[Floats, Ids]:
    """`top` of a large vocabulary, by looking only into the k blocks with the largest maxima.

    Each of those k blocks has a token as large as the smallest of their maxima, `least`. So what is larger than `least` and
    outside of them is not among the k largest; only of the tokens that equal `least` some may lie outside and come first.

    Block b has the tokens b, b + width, b + 2 width …: the maxima of all blocks are then a few element-wise maxima of long
    contiguous runs, ten times as fast as a reduction of many short ones.
    """
    rows, vocabulary = scores.shape
    full = vocabulary // width
    maxima = np.maximum.reduce(scores[:, : full * width].reshape(rows, full, width), axis=1)
    rest = scores[:, full * width :]
    np.maximum(maxima[:, : rest.shape[1]], rest, out=maxima[:, : rest.shape[1]])

    blocks = np.argpartition(maxima, width - k, axis=1)[:, width - k :]
    row = np.arange(rows)[:, None]
    least = maxima[row, blocks[:, :1]]
    ids = (blocks[:, :, None] + np.arange(0, vocabulary, width)).reshape(rows, k * -(-vocabulary // width))
    values = scores[row, np.minimum(ids, vocabulary - 1)]
    values[ids >= vocabulary] = -np.inf  # blocks that lack a last member; its id is beyond all others, so it is never taken
    best, best_ids = _from_keys(_largest_keys(_keys(values, ids), k))
    for tied in np.flatnonzero(np.count_nonzero(maxima >= least, axis=1) > k):
        equal = best[tied] == least[tied]
        # Where fewer than k are possible, as under a constraint, enough of the impossible are among any k tokens.
        among = scores[tied, : k if least[tied] == -np.inf else vocabulary]
        best_ids[tied, equal] = np.flatnonzero(among == least[tied])[: np.count_nonzero(equal)]
    return best, best_ids


def _keys(values: Floats, ids: Ids) -> Ids:
    """One number for a value and its id, larger for a larger value and for the smaller id: integers sort fast, without ties.

    The bits of floats, read as integers, are in the order of the floats once those below their sign are turned round in
    negative ones.
    """
    bits = (values + np.float32(0)).view(np.int32)  # adding 0 makes -0 equal 0
    keys = (bits ^ ((bits >> 31) & _BELOW_SIGN)).astype(np.int64)
    keys <<= 32
    keys -= ids
    return keys


def _largest_keys(keys: Ids, k: int) -> Ids:
    """The k largest of each row, largest first. Reorders `keys`."""
    if k < keys.shape[1]:
        keys.partition(keys.shape[1] - k, axis=1)
        keys = keys[:, -k:]
    keys.sort(axis=1)
    return keys[:, ::-1]


def _from_keys(keys: Ids) -> tuple[Floats, Ids]:
    ids = -keys & 0xFFFFFFFF
    bits = ((keys + ids) >> 32).astype(np.int32)
    return (bits ^ ((bits >> 31) & _BELOW_SIGN)).view(np.float32), ids
