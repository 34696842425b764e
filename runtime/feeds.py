"""Making feeds of another size out of feeds one has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import FeedError
from .signature import GraphSignature

BATCH = "batch"


def batch_axis_of(signature: GraphSignature) -> str | None:
    """The name of the batch axis: the one called so, else the first axis of the first input if it is named."""
    if BATCH in signature.dynamic_axes:
        return BATCH
    first = signature.inputs[0].shape[:1] if signature.inputs else ()
    return first[0] if first and isinstance(first[0], str) else None


def natural_batch(signature: GraphSignature) -> int:
    """The batch size to use when nobody asks for one: 1, or the only one that a graph with fixed sizes takes."""
    first = signature.inputs[0].shape[:1] if signature.inputs else ()
    return first[0] if batch_axis_of(signature) is None and first and isinstance(first[0], int) else 1


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


def example_feeds(signature: GraphSignature, sizes: Mapping[str, int], seed: int = 0) -> dict[str, NDArray[Any]]:
    """Feeds of the asked sizes with plain values: normal floats, zeros for integers (always valid as indices)."""
    random = np.random.default_rng(seed)
    feeds: dict[str, NDArray[Any]] = {}
    for spec in signature.inputs:
        shape = tuple(dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in spec.shape)
        floating = spec.dtype.startswith("float")
        feeds[spec.name] = np.asarray(random.standard_normal(shape) if floating else np.zeros(shape), dtype=spec.dtype)
    return feeds
