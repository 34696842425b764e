"""load(path) → Model: what an application calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .bundle import Bundle
from .errors import FeedError, OptionError
from .generation.generate import Batch, Context, TextGenerator, text_generator
from .generation.scheduler import MOST_ROWS
from .session import Session
from .signature import TensorSpec


@dataclass(frozen=True)
class Prediction:
    """Answers for a batch; `label` and `value` are for a batch of one.

    Classification fills `labels` and `probabilities` (batch, classes); regression fills `values` (batch,).
    """

    labels: tuple[str, ...] | None = None
    probabilities: NDArray[np.float32] | None = None
    values: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.labels) if self.labels is not None else len(self.values if self.values is not None else ())

    @property
    def label(self) -> str:
        if self.labels is None:
            raise FeedError("this is a regression: read .value or .values")
        self._require_one("labels")
        return self.labels[0]

    @property
    def value(self) -> float:
        if self.values is None:
            raise FeedError("this is a classification: read .label, .labels or .probabilities")
        self._require_one("values")
        return float(self.values[0])

    def _require_one(self, plural: str) -> None:
        if len(self) != 1:
            raise FeedError(f"the batch holds {len(self)} predictions; read .{plural}")


class Model:
    """A bundle ready to run. Make one with `load`."""

    def __init__(self, bundle: Bundle, *, device: str = "auto", threads: int | None = None, strict: bool = False) -> None:
        self.bundle = bundle
        self.task = bundle.manifest.task
        self.sessions = {
            name: Session(bundle.graph_path(name), graph.signature, device=device, threads=threads, strict=strict)
            for name, graph in bundle.manifest.graphs.items()
        }
        self.device = next(iter(self.sessions.values())).device

    def run(self, feeds: Mapping[str, NDArray[Any]], *, graph: str | None = None) -> dict[str, NDArray[Any]]:
        """Raw tensors in and out, for any graph of any bundle."""
        name, _ = self.bundle.graph(graph)
        return self.sessions[name].run(feeds)

    def predict(self, inputs: ArrayLike | Mapping[str, NDArray[Any]]) -> Prediction:
        """Raw pixels or raw columns in, labels or values out. Takes one sample or a batch of them."""
        if self.task not in ("classification", "regression"):
            raise OptionError(f"predict is for classification and regression; this bundle's task is {self.task!r}: use run")
        name, graph = self.bundle.graph()
        feeds = dict(inputs) if isinstance(inputs, Mapping) else {}
        if not feeds:
            if len(graph.signature.inputs) != 1:
                names = ", ".join(spec.name for spec in graph.signature.inputs)
                raise FeedError(f"this model takes several inputs; pass a dict with: {names}")
            spec = graph.signature.inputs[0]
            feeds = {spec.name: as_batch(spec, inputs)}
        output = self.sessions[name].run(feeds)[graph.signature.outputs[0].name]
        if self.task == "regression":
            return Prediction(values=output.reshape(len(output), -1)[:, 0])
        winners = output.argmax(axis=-1)
        known = self.bundle.manifest.labels or tuple(str(index) for index in range(output.shape[-1]))
        return Prediction(labels=tuple(known[index] for index in winners), probabilities=softmax(output))

    # Generating, for language models and encoder–decoders

    def generate(self, prompts: Any, **options: Any) -> Any:
        """What follows a prompt, or the target of a source: a `Generation`; for a list of prompts a list of them.

        A prompt is a text or token numbers. With n_best > 1 there is a list for each prompt. See `generation.Options`.
        """
        return self._generator.generate(prompts, options)

    def stream(self, prompt: Any, **options: Any) -> Iterator[str]:
        """The text that `generate` would give, piece by piece as it becomes final. To cancel, close the iterator."""
        return self._generator.stream(prompt, options)

    def read(self, text: Any) -> Context:
        """A beginning that is computed once and then continued as often as one likes; for language models."""
        return self._generator.read(text)

    def scheduler(self, *, most_rows: int = MOST_ROWS, memory_limit: int | None = None) -> Batch:
        """A running batch that requests can join at any time."""
        return Batch(self._generator, most_rows=most_rows, memory_limit=memory_limit)

    @cached_property
    def _generator(self) -> TextGenerator:
        return text_generator(self.bundle, self.sessions)


def load(path: str | Path, *, device: str = "auto", threads: int | None = None, strict: bool = False) -> Model:
    """Open a bundle, check every file in it, and make it ready to run. See `Session` for `device`."""
    return Model(Bundle.open(path), device=device, threads=threads, strict=strict)


def softmax(logits: NDArray[Any]) -> NDArray[np.float32]:
    shifted = np.exp((logits - logits.max(axis=-1, keepdims=True)).astype(np.float32))
    total: NDArray[np.float32] = shifted / shifted.sum(axis=-1, keepdims=True)
    return total


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
