"""Raw numbers as a graph takes them: one sample or a batch, converted without loss, ragged ones in groups of equal shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import FeedError
from .signature import TensorSpec


def as_batch(spec: TensorSpec, values: Any) -> NDArray[Any]:
    """`values` as the batch that `spec` takes: converts numbers, adds a missing batch axis and a missing single channel."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise FeedError(
            f"{spec.name!r} cannot be made into one array ({error}); samples must all have the same shape"
        ) from None
    if array.dtype.kind not in "fiub":
        raise FeedError(f"{spec.name!r} holds {array.dtype}, expected numbers ({spec})")
    sample = spec.shape[1:]
    fits = [sample]
    if len(sample) == 3 and sample[0] == 1:  # a grey image may come without its channel axis
        fits.append(sample[1:])
    for shape in fits:
        if _matches(array.shape, shape):
            array = array[None]
            break
        if array.ndim and _matches(array.shape[1:], shape):
            break
    else:
        wanted = " or ".join(str(list(shape)) for shape in fits)
        turned = len(sample) == 3 and array.ndim in (3, 4) and array.shape[-1] == sample[0] != array.shape[-3]
        hint = "; channels come first: use np.moveaxis(image, -1, -3)" if turned else ""
        raise FeedError(
            f"{spec.name!r} has shape {list(array.shape)}; expected one sample of {wanted}, or a batch of them{hint}"
        )
    array = array.reshape(len(array), *(array.shape[1:] if len(fits) == 1 else _known(sample, array)))
    return convert(spec, array)


def convert(spec: TensorSpec, array: NDArray[Any]) -> NDArray[Any]:
    """`array` in the dtype of `spec`; FeedError if a value would be cut off, wrapped around or not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        converted = np.array(array, dtype=spec.dtype, order="C")
    if converted.dtype.kind == "f":
        wrong = ~np.isfinite(converted)
        problem = f"which is not a finite {spec.dtype}; remove or fill it first"
    else:
        wrong = converted != array
        problem = f"which {spec.dtype} cannot hold exactly"
    if wrong.any():
        place = tuple(int(index) for index in np.argwhere(wrong)[0])
        where = f"sample {place[0]}" if place else "it"
        raise FeedError(f"{spec.name!r} has the value {array[place]} in {where}, {problem}")
    return converted


def _matches(shape: tuple[int, ...], dims: tuple[int | str, ...]) -> bool:
    return len(shape) == len(dims) and all(isinstance(dim, str) or dim == size for size, dim in zip(shape, dims, strict=True))


def _known(sample: tuple[int | str, ...], array: NDArray[Any]) -> tuple[int, ...]:
    return (1, *array.shape[-2:]) if len(sample) == 3 else array.shape[1:]


def groups_of(spec: TensorSpec, values: Any) -> list[tuple[list[int], NDArray[Any]]]:
    """`values` as batches for `spec`, each with the places of its samples.

    One batch, unless they are a list of samples of different sizes and the graph takes such: then one for each shape.
    """
    samples = _ragged(spec, values)
    if samples is None:
        batch = as_batch(spec, values)
        if not len(batch):
            raise FeedError(f"{spec.name!r} holds no samples; expected at least one")
        return [(list(range(len(batch))), batch)]
    places: dict[tuple[int, ...], list[int]] = {}
    for place, sample in enumerate(samples):
        if not _matches(sample.shape, spec.shape[1:]):
            raise FeedError(f"sample {place} of {spec.name!r} has shape {list(sample.shape)}; expected {list(spec.shape[1:])}")
        if not sample.size:
            raise FeedError(f"sample {place} of {spec.name!r} is empty; leave it out")
        check_finite(f"sample {place} of {spec.name}", sample)
        places.setdefault(sample.shape, []).append(place)
    return [(chosen, as_batch(spec, np.stack([samples[place] for place in chosen]))) for chosen in places.values()]


def _ragged(spec: TensorSpec, values: Any) -> list[NDArray[Any]] | None:
    """The samples of a list in which they differ in shape; None if they do not, or the graph has no axis that may."""
    if not isinstance(values, Sequence) or isinstance(values, str) or not any(isinstance(dim, str) for dim in spec.shape[1:]):
        return None
    try:
        samples = [np.asarray(value) for value in values]
    except ValueError:
        return None  # a sample that is itself ragged: `as_batch` says so
    return samples if len({sample.shape for sample in samples}) > 1 else None


def check_finite(name: str, array: NDArray[Any]) -> None:
    """Refuse NaN and infinities, which spread through a network without a word."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        place = tuple(int(index) for index in np.argwhere(~np.isfinite(array))[0])
        raise FeedError(f"{name!r} has the value {array[place]} at {list(place)}, which is not finite; remove or fill it first")
