"""A failing case made small: fewer rows and steps, as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, count, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.signature import GraphSignature

_SMALL = 8  # sizes up to this are tried one by one; above it, doubling
Fails = Callable[[dict[str, int]], bool]


def shrink(fails: Fails, sizes: Mapping[str, int], example: Mapping[str, int]) -> dict[str, int]:
    """The smallest sizes found at which `fails` still holds; `sizes` themselves must fail.

    First every axis goes back to the example's size where it can, so that an axis without guilt does not hide the guilty one.
    Then each shrinks alone: failing is not monotone (a baked 3 fails at 2 and 4, not at 3), so sizes are tried from 1 upwards
    rather than bisected. An axis that is the sum of two others follows them.
    """
    sums = _sums(sizes, example)
    best = dict(sizes)
    for axis, candidates in (
        *((axis, [example[axis]]) for axis in sizes if axis in example),
        *((axis, _upwards()) for axis in sizes),
    ):
        for size in candidates:
            if size >= best[axis] or axis in sums:
                break
            smaller = _with(best, axis, size, sums)
            if fails(smaller):
                best = smaller
                break
    return best


def axes_that_matter(fails: Fails, sizes: Mapping[str, int], example: Mapping[str, int]) -> tuple[str, ...]:
    """The axes that must differ from the example's size for the failure to show; none if it also fails at the example's."""
    if fails(dict(example)):
        return ()
    sums = _sums(sizes, example)
    differing = [axis for axis, size in sizes.items() if size != example.get(axis, size) and axis not in sums]
    return tuple(axis for axis in differing if not fails(_with(sizes, axis, example[axis], sums))) or tuple(differing)


def resized(signature: GraphSignature, inputs: Mapping[str, NDArray[Any]], sizes: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """`inputs` at other sizes: their first rows, repeated where more are asked for, so that what made them fail is kept."""
    result = {}
    for spec in signature.inputs:
        array = inputs[spec.name]
        for axis, dim in enumerate(spec.shape):
            size = sizes.get(dim, array.shape[axis]) if isinstance(dim, str) else array.shape[axis]
            if size and not array.shape[axis]:  # an empty past has no rows to repeat
                array = np.zeros((*array.shape[:axis], size, *array.shape[axis + 1 :]), array.dtype)
            elif size > array.shape[axis]:
                array = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
            elif size < array.shape[axis]:
                array = _part(array, axis, size)
        result[spec.name] = np.array(array, order="C")
    return result


def _part(array: NDArray[Any], axis: int, size: int) -> NDArray[Any]:
    """The first rows; of a mask the last, where the first would mask everything, which fails for a reason of its own."""
    first, last = np.arange(size), np.arange(array.shape[axis] - size, array.shape[axis])
    part = np.take(array, first, axis=axis)
    is_mask = array.dtype == bool or (array.dtype.kind in "iu" and bool(np.isin(array, (0, 1)).all()))
    if is_mask and bool((array.any(axis=axis) & ~part.any(axis=axis)).any()):
        return np.take(array, last, axis=axis)
    return part


def _sums(sizes: Mapping[str, int], example: Mapping[str, int]) -> dict[str, tuple[str, str]]:
    """Axes that are the sum of two others, here and in the example: a mask is as long as past and new tokens together."""
    sums: dict[str, tuple[str, str]] = {}
    for (first, second), axis in product(combinations(sizes, 2), sizes):
        found = all(known.get(axis, 0) == known.get(first, 0) + known.get(second, 0) for known in (sizes, example))
        if found and not {axis, first, second} & sums.keys() and axis not in (first, second):
            sums[axis] = (first, second)
    return sums


def _with(sizes: Mapping[str, int], axis: str, size: int, sums: Mapping[str, tuple[str, str]]) -> dict[str, int]:
    changed = dict(sizes) | {axis: size}
    return changed | {total: changed[first] + changed[second] for total, (first, second) in sums.items()}


def _upwards() -> Iterator[int]:
    """1, 2, 3, … and above _SMALL 16, 32, …"""
    yield from range(1, _SMALL + 1)
    for power in count(1):
        yield _SMALL * 2**power
