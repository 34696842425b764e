"""Which data belongs to a bundle, and how good the bundle is on it, through the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporters.likelihood import generates, quality_of_text
from exporters.quantize import GOLDENS, Quality
from exporters.quantizers.scheme import Calibration
from runtime.bundle import Bundle
from runtime.errors import DataError, OptionError
from runtime.feeds import batch_axis_of
from runtime.metrics import METRICS
from runtime.model import as_batch
from runtime.session import Session
from runtime.signature import GraphSignature

from .data.arrays import load_samples, read_arrays
from .data.catalog import DATASETS, load_data, load_path
from .data.dataset import Dataset, DataSettings, split
from .opening import takes_text
from .text_calibration import text_calibration
from .text_evaluation import Progress, evaluate_text
from .text_quality import quality_on_texts

_BATCH = 64
_CALIBRATION_ROWS = 512  # measured ranges of min-max settle well before that on the networks here
_CALIBRATION_BYTES = 4 << 20  # of the samples in a batch


@dataclass(frozen=True)
class BundleData:
    """Labelled rows for a bundle: some to calibrate on, some to judge by."""

    train: Dataset
    test: Dataset
    description: str


@dataclass(frozen=True)
class EvaluateReport:
    bundle: str
    task: str
    metrics: dict[str, float]
    rows: int
    data: str

    def to_json(self) -> dict[str, Any]:
        return vars(self)


def evaluate(
    path: str | Path,
    data: str | None,
    *,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress = lambda done, total: None,
) -> EvaluateReport:
    bundle = Bundle.open(path)
    if bundle.manifest.task == "tensors":
        raise OptionError(
            f"{path} has the task 'tensors', which has no metric; use edgekit verify "
            "(a network of your own can be exported with task='classification' or 'regression')"
        )
    if takes_text(bundle.manifest):
        measured = evaluate_text(bundle, data, device=device, threads=threads, progress=progress)
        return EvaluateReport(str(path), bundle.manifest.task, *measured)
    found = data_for(bundle, data)
    if found is None:
        raise OptionError(f"{path} does not say what it was trained on; pass labelled data with --data PATH")
    outputs = predict_all(bundle, found.test.inputs, device=device, threads=threads)
    progress(len(outputs), len(outputs))
    metric = METRICS[bundle.manifest.task]
    metrics = {metric.name: metric.compute(outputs, found.test.targets)}
    if bundle.manifest.task == "classification":
        metrics["errors"] = int(np.sum(outputs.argmax(axis=-1) != found.test.targets))
    else:
        metrics["rmse"] = float(np.sqrt(metrics["mse"]))
        variance = float(np.var(found.test.targets.astype(np.float64)))
        metrics["r2"] = 1 - metrics["mse"] / variance if variance else float("nan")
    return EvaluateReport(str(path), bundle.manifest.task, metrics, len(found.test), found.description)


def predict_all(bundle: Bundle, inputs: NDArray[Any], *, device: str = "cpu", threads: int | None = None) -> NDArray[Any]:
    """The first output of the bundle's only graph for every row."""
    _, graph = bundle.graph()
    session = Session(bundle.graph_path(), graph.signature, device=device, threads=threads)
    spec = graph.signature.inputs[0]
    name = graph.signature.outputs[0].name
    rows = as_batch(spec, inputs)
    return np.concatenate([session.run({spec.name: part})[name] for part in _parts(bundle, rows, _BATCH)])[: len(rows)]


def data_for(bundle: Bundle, path: str | None) -> BundleData | None:
    """The labelled data of a bundle: what it was trained on, or the file at `path`. None if there is nothing labelled."""
    recorded = bundle.manifest.data
    if path is None:
        if recorded is None:
            return None
        if recorded["name"] not in DATASETS:
            raise OptionError(
                f"the network was trained on {recorded['name']}; pass it, or other labelled data, with --data PATH"
            )
        settings = DataSettings(name=str(recorded["name"]), limit=recorded.get("limit"))
        return _split(load_data(settings, tasks=(bundle.manifest.task,)), recorded)
    if bundle.manifest.task == "tensors":
        return None
    about = bundle.manifest.preprocessing or {}
    settings = DataSettings(
        target=(recorded or {}).get("target"),
        columns=tuple(about.get("columns") or ()) if Path(path).suffix.lower() in (".csv", ".tsv") else (),
        image_size=int(about["shape"][1]) if about.get("kind") == "image" else None,
    )
    data = _with_labels_of(bundle, load_path(Path(path), settings, tasks=(bundle.manifest.task,)), path)
    as_batch(bundle.graph()[1].signature.inputs[0], data.inputs[:1])  # refuses another shape before any work is done
    used = data.limited(recorded["limit"]) if recorded and recorded.get("limit") else data
    if recorded and recorded["fingerprint"] == used.fingerprint:
        return _split(used, recorded)
    return BundleData(data, data, f"all {len(data)} rows of {data.name}")


def quality_for(bundle: Bundle, path: str | None) -> tuple[Quality, Calibration | None]:
    """How to judge variants of `bundle`, and samples to calibrate on. Without labels: agreement with `bundle` itself."""
    if takes_text(bundle.manifest):
        calibration = text_calibration(bundle, path)
        own = quality_of_text(bundle) if generates(bundle) else None
        if (measured := quality_on_texts(bundle, path)) is not None:
            return measured if own is None else replace(measured, details=own.details), calibration
        if own is not None:
            return own, calibration
        goldens = [inputs for _, inputs, _ in bundle.goldens()]
        return _agreement(bundle, goldens, GOLDENS), calibration
    recorded = bundle.manifest.data
    unknown = path is None and recorded is not None and recorded["name"] not in DATASETS  # the user's own, and not at hand
    found = None if unknown or _is_unlabelled(bundle, path) else data_for(bundle, path)
    if found is not None:
        spec = bundle.graph()[1].signature.inputs[0]
        metric = METRICS[bundle.manifest.task]
        rows = as_batch(spec, found.train.inputs[_spread(len(found.train))])
        quality = Quality(
            metric,
            lambda variant: metric.compute(predict_all(variant, found.test.inputs), found.test.targets),
            found.description,
        )
        at_once = _fitting(len(rows), rows.nbytes)  # fewer where they are large: what is looked at of them is larger still
        return quality, lambda graph: ({spec.name: part} for part in _parts(bundle, rows, at_once))
    if path is None:
        goldens = [inputs for _, inputs, _ in bundle.goldens()]
        return _agreement(bundle, goldens, GOLDENS), (lambda graph: iter(goldens)) if _is_fresh(bundle) else None
    signature = bundle.graph()[1].signature
    batches = list(_feed_parts(signature, load_samples(Path(path), signature)))
    if not batches:
        raise DataError(f"{path} holds no samples; pass --data with one or more")
    return _agreement(bundle, batches, f"the samples of {Path(path).name}"), lambda graph: iter(batches)


def _is_unlabelled(bundle: Bundle, path: str | None) -> bool:
    """Whether the file has samples alone: an array for each input of the graph, and none with targets."""
    if path is None or Path(path).suffix.lower() != ".npz" or not Path(path).is_file():
        return False
    return set(read_arrays(Path(path))) == {spec.name for spec in bundle.graph()[1].signature.inputs}


def _agreement(bundle: Bundle, batches: list[dict[str, NDArray[Any]]], where: str) -> Quality:
    reference = _outputs(bundle, batches)
    metric = METRICS["tensors"]

    def compared(values: NDArray[Any], expected: NDArray[Any]) -> float:
        """Of the numbers; what masks make infinite has to be so again, and sizes that depend on values have to be the same."""
        if values.shape != expected.shape:
            return float("nan")
        finite = np.isfinite(expected)
        same = np.array_equal(values[~finite], expected[~finite], equal_nan=True)
        return metric.compute(values[finite], expected[finite]) if same else float("nan")

    def measure(variant: Bundle) -> float:
        """Agreement of the output that agrees least; NaN if any has become so."""
        return float(np.min([compared(values, reference[name]) for name, values in _outputs(variant, batches).items()]))

    return Quality(metric, measure, f"{where}, against fp32")


def _is_fresh(bundle: Bundle) -> bool:
    """Of weights that nothing trained, as those of an architecture that is exported by its name, any input is a fair sample."""
    return any(step.get("source", {}).get("kind") == "architecture" for step in bundle.manifest.lineage)


def _split(data: Dataset, recorded: Any) -> BundleData:
    keys = ("seed", "validation", "test", "folds", "fold")
    settings = DataSettings(**{key: recorded[key] for key in keys if key in recorded})
    if recorded["fingerprint"] != data.fingerprint:
        raise DataError(f"{data.name} is not the data the network was trained on any more; pass labelled data with --data PATH")
    parts = split(data, settings)
    return BundleData(parts.train, parts.test, f"the test part of {data.name}, {len(parts.test)} rows")


def _with_labels_of(bundle: Bundle, data: Dataset, path: str) -> Dataset:
    """`data` with its class numbers in the bundle's order of labels; without labels, classes are numbers already."""
    if data.task != "classification" or data.labels is None:
        return data
    labels = bundle.manifest.labels
    if labels is None:
        classes = bundle.graph()[1].signature.outputs[0].shape[-1]
        labels = tuple(map(str, range(classes if isinstance(classes, int) else 0)))
    if unknown := [label for label in data.labels if label not in labels]:
        raise DataError(f"{path} has the class {unknown[0]!r}, which the network does not know; it knows: {', '.join(labels)}")
    numbers = np.array([labels.index(label) for label in data.labels], dtype=np.int64)
    return replace(data, targets=numbers[data.targets], labels=labels)


def _outputs(bundle: Bundle, batches: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Every output over all batches, flat."""
    _, graph = bundle.graph()
    session = Session(bundle.graph_path(), graph.signature, device="cpu")
    runs = [session.run(inputs) for inputs in batches]
    return {name: np.concatenate([run[name].ravel() for run in runs]) for name in runs[0]}


def _spread(rows: int) -> NDArray[np.int64]:
    """Evenly spaced rows to calibrate on: data sorted by class must not show its first classes only."""
    return np.unique(np.linspace(0, rows - 1, min(rows, _CALIBRATION_ROWS)).astype(np.int64))


def _feed_parts(signature: GraphSignature, feeds: dict[str, NDArray[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
    """Feeds cut into batches along the batch axis, or to the size of a fixed one; whole if the graph has none."""
    fixed = _fixed_batch(signature, feeds)
    if fixed is not None:
        count = max(len(array) for array in feeds.values() if array.ndim)
        for rows in _row_numbers(count, fixed, filled=True):
            part = {name: array[rows] if array.ndim else array for name, array in feeds.items()}
            signature.check_feeds(part)
            yield part
        return
    signature.check_feeds(feeds)
    axis_name = batch_axis_of(signature)
    if axis_name is None:
        yield feeds
        return
    axes = {spec.name: spec.shape.index(axis_name) for spec in signature.inputs if axis_name in spec.shape}
    count = min(feeds[name].shape[axis] for name, axis in axes.items())
    at_once = _fitting(count, sum(feeds[name].nbytes for name in axes))
    for rows in _row_numbers(count, at_once, filled=False):
        yield {name: np.take(array, rows, axis=axes[name]) if name in axes else array for name, array in feeds.items()}


def _fixed_batch(signature: GraphSignature, feeds: dict[str, NDArray[Any]]) -> int | None:
    """The rows that a graph of fixed sizes takes, if all its inputs have so many, and all arrays equally many others."""
    sizes = {spec.shape[0] for spec in signature.inputs if spec.shape}
    counts = {len(array) for array in feeds.values() if array.ndim}
    size = sizes.pop() if len(sizes) == len(counts) == 1 else None
    return size if isinstance(size, int) and size > 0 and counts != {size} else None


def _parts(bundle: Bundle, inputs: NDArray[Any], size: int) -> Iterator[NDArray[Any]]:
    """Up to so many rows each; of a fixed batch as many as it takes."""
    first = bundle.graph()[1].signature.inputs[0].shape[0]
    at_once = first if isinstance(first, int) else size
    return (inputs[rows] for rows in _row_numbers(len(inputs), at_once, filled=isinstance(first, int)))


def _row_numbers(count: int, size: int, *, filled: bool) -> Iterator[NDArray[np.int64]]:
    """Batch by batch; the last one is short, or filled up with the last row."""
    for start in range(0, count, size):
        rows = np.arange(start, start + size)
        yield np.minimum(rows, count - 1) if filled else rows[rows < count]


def _fitting(rows: int, size: int) -> int:
    """How many of so many rows, of so many bytes together, make a batch."""
    return max(1, min(_BATCH, _CALIBRATION_BYTES * rows // max(1, size)))
