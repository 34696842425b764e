"""Making feeds of another size out of feeds one has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import FeedError
from .signature import Dim, GraphSignature

BATCH = "batch"

SHORT = 8  # values; few enough to see each of them in a handful of cases

Pool = Sequence[float]
"""The values an input may take: range(50257) for an index into a table, (8000, 16000) for a sample rate."""


def batch_axis_of(signature: GraphSignature) -> str | None:
    """The name of the batch axis: the one called so, else the first axis of the first input that has axes, if it is named."""
    if BATCH in signature.dynamic_axes:
        return BATCH
    first = _first_axis(signature)
    return first if isinstance(first, str) else None


def natural_batch(signature: GraphSignature) -> int:
    """The batch size to use when nobody asks for one: 1, or the only one that a graph with fixed sizes takes."""
    first = _first_axis(signature)
    return first if batch_axis_of(signature) is None and isinstance(first, int) else 1


def _first_axis(signature: GraphSignature) -> Dim | None:
    """Of the first input with axes: a scalar before it, such as a sample rate, says nothing of the batch."""
    return next((spec.shape[0] for spec in signature.inputs if spec.shape), None)


def batch_of(signature: GraphSignature, feeds: Mapping[str, NDArray[Any]], size: int) -> dict[str, NDArray[Any]]:
    """`feeds` repeated or cut to `size` along the batch axis."""
    axis_name = batch_axis_of(signature)
    if axis_name is None and size != natural_batch(signature):
        fixed = natural_batch(signature)
        raise FeedError(f"this graph has a fixed batch of {fixed}; batch {size} cannot be run, export it with a dynamic one")
    resized = {}
    for spec in signature.inputs:
        array = feeds[spec.name]
        if axis_name is not None and axis_name in spec.shape:
            axis = spec.shape.index(axis_name)
            array = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
        resized[spec.name] = np.array(array, order="C")
    return resized


def example_feeds(
    signature: GraphSignature, sizes: Mapping[str, int], seed: int = 0, pools: Mapping[str, Pool] | None = None
) -> dict[str, NDArray[Any]]:
    """Feeds of the asked sizes. Inputs with a pool draw from it; a single value takes those of a short pool in turn, by seed.

    Without a pool: normal floats, and zeros for integers (nearly always valid as indices).
    """
    random = np.random.default_rng(seed)
    feeds: dict[str, NDArray[Any]] = {}
    for spec in signature.inputs:
        if spec.dtype == "bfloat16":
            raise FeedError(f"input {spec.name!r} holds bfloat16 values, which numpy has no type for; cast it to float32 first")
        shape = tuple(dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in spec.shape)
        pool = (pools or {}).get(spec.name)
        if pool is not None:
            in_turn = np.prod(shape) == 1 and len(pool) <= SHORT
            values = (
                np.full(shape, pool[seed % len(pool)]) if in_turn else np.asarray(pool)[random.integers(0, len(pool), shape)]
            )
        else:
            values = random.standard_normal(shape) if spec.dtype.startswith("float") else np.zeros(shape)
        feeds[spec.name] = np.asarray(values, dtype=spec.dtype)
    return feeds
