"""Running a bundle on a file: an image, a table, or arrays."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime import Model, Prediction, load
from runtime.errors import DataError, OptionError, OutputExists
from runtime.files import write_file
from runtime.signature import TensorSpec

from .data.arrays import load_feeds, read_arrays
from .data.image_folder import SUFFIXES, read_image
from .data.table import read_columns
from .opening import takes_text

_INPUT_NAMES = ("inputs", "x", "X")


def run_file(
    bundle: str, path: str, output: str | None, *, force: bool, device: str, threads: int | None
) -> tuple[list[str], Any]:
    """Lines to print, and the same as a JSON document."""
    if output and not output.endswith(".npz"):
        raise OptionError(
            f"-o writes arrays and must end in .npz, not {Path(output).name}; for text, redirect the output or use --json"
        )
    if output and Path(output).exists() and not force:
        raise OutputExists(f"{output} already exists; choose another -o, or pass --force to replace it")
    model = load(bundle, device=device, threads=threads)
    if len(model.sessions) > 1:
        raise OptionError(
            f"{bundle} has several graphs ({', '.join(model.sessions)}) and --input is for bundles of one; give a text with "
            "--text or --stdin, or in Python: runtime.load(…).run(feeds, graph=…)"
        )
    if output or model.task == "tensors" or takes_text(model.bundle.manifest):
        return _run_tensors(model, Path(path), output)
    prediction = model.predict(_read(model, Path(path)))
    if not len(prediction):
        raise DataError(f"{path} holds no samples; expected at least one")
    return prediction_lines(prediction), prediction_document(prediction)


def prediction_lines(prediction: Prediction) -> list[str]:
    if prediction.values is not None:
        return [f"{value:.6g}" for value in prediction.values]
    assert prediction.labels is not None
    assert prediction.probabilities is not None
    return [
        f"{label}  ({100 * row.max():.1f} %)" for label, row in zip(prediction.labels, prediction.probabilities, strict=True)
    ]


def prediction_document(prediction: Prediction) -> Any:
    if prediction.values is not None:
        return [{"value": float(value)} for value in prediction.values]
    assert prediction.labels is not None
    assert prediction.probabilities is not None
    return [
        {"label": label, "probabilities": row.tolist()}
        for label, row in zip(prediction.labels, prediction.probabilities, strict=True)
    ]


def _run_tensors(model: Model, path: Path, output: str | None) -> tuple[list[str], Any]:
    signature = model.bundle.graph()[1].signature
    if path.suffix.lower() == ".npz" and set(read_arrays(path)) == {spec.name for spec in signature.inputs}:
        feeds = load_feeds(path, signature)
    elif len(signature.inputs) == 1:
        from runtime.model import as_batch

        feeds = {signature.inputs[0].name: as_batch(signature.inputs[0], _read(model, path))}
    else:
        feeds = load_feeds(path, signature)  # says which arrays are expected
    outputs = model.run(feeds)
    if not all(array.size for array in outputs.values()):
        raise DataError(f"{path} holds no samples; expected at least one")
    lines = [
        f"{name}: {array.dtype}{list(array.shape)}  mean {array.mean():.6g}  min {array.min():.6g}  max {array.max():.6g}"
        for name, array in outputs.items()
    ]
    if output:
        buffer = io.BytesIO()
        np.savez(buffer, **outputs)  # type: ignore[arg-type]
        write_file(Path(output), buffer.getvalue())
        lines.append(f"outputs: {output}")
    return lines, {name: array.tolist() for name, array in outputs.items()}


def _read(model: Model, path: Path) -> NDArray[Any]:
    """The raw samples in `path`, as the model's only input takes them."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; pass one file: an image, a .csv/.tsv, or an .npz/.npy")
    if not path.is_file():
        raise DataError(f"there is no file {path}; expected an image, a .csv/.tsv, or an .npz/.npy")
    about = model.bundle.manifest.preprocessing or {}
    spec = model.bundle.graph()[1].signature.inputs[0]
    suffix = path.suffix.lower()
    if suffix in SUFFIXES:
        channels, height, width = _image_shape(spec)
        pixels = read_image(path, channels=channels, height=height, width=width)
        return pixels * np.float32(about.get("maximum", 255.0) / 255.0)
    if suffix in (".csv", ".tsv"):
        if not about.get("columns"):
            raise DataError(f"{path} is a table, but this model does not take columns ({spec}); pass an image or an .npz")
        return read_columns(path, about["columns"])
    if suffix == ".npy":
        try:
            return np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read as .npy ({error}); save it with np.save") from None
    if suffix == ".npz":
        arrays = read_arrays(path)
        for name in (spec.name, *_INPUT_NAMES):
            if name in arrays:
                return arrays[name]
        raise DataError(f"{path} has the arrays {', '.join(arrays) or 'none'}; expected {spec.name!r} or 'inputs'")
    raise DataError(f"{path} is not of a known kind; expected an image ({', '.join(SUFFIXES)}), .csv, .tsv, .npz or .npy")


def _image_shape(spec: TensorSpec) -> tuple[int, int, int]:
    sizes = [dim for dim in spec.shape[1:] if isinstance(dim, int)]
    if len(spec.shape) != 4 or len(sizes) != 3:
        raise DataError(f"this model does not take an image but {spec}; pass a .csv, .npz or .npy")
    return sizes[0], sizes[1], sizes[2]
