"""Someone's .onnx → bundle. Nobody here knows its PyTorch, so the original file, run without graph optimizations, is the
reference: goldens come from it, and its dynamic axes are tried before they are believed."""

from __future__ import annotations

from pathlib import Path

import onnx

from runtime.bundle import Tolerance, lineage_step
from runtime.errors import EdgekitError, SourceError
from runtime.feeds import batch_axis_of, example_feeds
from runtime.files import sha256_of
from runtime.session import Session
from runtime.signature import GraphSignature

from .export import ExportReport, GraphProof, Progress, refuse_failures, write_proofs
from .exportable import MODEL
from .graph import read_model, signature_of
from .parity import Arrays, Reference, compare_cases, derive_tolerance, fresh_inputs, fuzz_cases

_EXAMPLE_BATCH = 3
_USUAL_SIZES = (32, 224, 64, 8, 3)  # of images and sequences; nothing in the file says which


def adopt(path: str | Path, target: str | Path, *, force: bool = False, progress: Progress = lambda step: None) -> ExportReport:
    """Write the ONNX file at `path` as a bundle at `target`."""
    path = Path(path)
    progress("reading the model")
    model = read_model(path)
    signature = signature_of(model)
    _check(path, model)
    data = model.SerializeToString()  # weights from external files are inside it now
    reference_session = Session(data, signature, device="cpu", optimization="none", log_level=4)
    reference: Reference = lambda feeds: reference_session.run(feeds)  # noqa: E731
    progress("comparing with the original")
    inputs, skipped = _runnable_cases(path, signature, reference)
    tolerance = {
        name: Tolerance(item.allowed, item.measured, item.derived.replace("PyTorch", "the original"))
        for name, item in derive_tolerance(reference, None, [feeds for _, feeds in inputs]).items()
    }
    cases = compare_cases(Session(data, signature, device="cpu"), reference, tolerance, inputs)
    refuse_failures(path.name, cases)
    progress("writing the bundle")
    proof = GraphProof(MODEL, model, signature, tuple(cases), tolerance, skipped)
    source = {"kind": "onnx", "file": path.name, "sha256": sha256_of(path), "producer": model.producer_name}
    bundle = write_proofs(
        target, [proof], name=path.stem, task="tensors", lineage=lineage_step("export", None, source=source), force=force
    )
    return ExportReport(bundle, (proof,))


def _check(path: Path, model: onnx.ModelProto) -> None:
    try:
        onnx.checker.check_model(model)
    except Exception as error:
        first = str(error).strip().splitlines()[0][:300]
        raise SourceError(f"{path} breaks the ONNX standard: {first}; export it again from its framework") from error


def _example_sizes(signature: GraphSignature, reference: Reference) -> dict[str, int]:
    """A size for each dynamic axis: few rows, and for the others the first usual size at which the original runs."""
    batch = batch_axis_of(signature)
    for size in _USUAL_SIZES:
        sizes = {axis: _EXAMPLE_BATCH if axis == batch else size for axis in signature.dynamic_axes}
        try:
            reference(example_feeds(signature, sizes))
        except EdgekitError:
            continue
        return sizes
    return dict.fromkeys(signature.dynamic_axes, _EXAMPLE_BATCH)


def _runnable_cases(
    path: Path, signature: GraphSignature, reference: Reference
) -> tuple[list[tuple[dict[str, int], Arrays]], tuple[str, ...]]:
    """The sizes the original runs at. Declared axes that cannot move are noted, not refused: the file is what it is."""
    axes = _example_sizes(signature, reference)
    runnable, skipped = [], []
    candidates = [*fuzz_cases(axes), dict.fromkeys(axes, 1)]
    for seed, sizes in enumerate(candidates):
        feeds = fresh_inputs(signature, example_feeds(signature, axes), sizes, seed)
        try:
            reference(feeds)
        except EdgekitError as error:
            skipped.append(f"{', '.join(f'{axis}={size}' for axis, size in sizes.items())}: {error}")
        else:
            runnable.append((sizes, feeds))
    if not runnable:
        raise SourceError(f"{path} runs at none of the sizes tried; first reason: {skipped[0]}")
    return runnable, tuple(skipped)
