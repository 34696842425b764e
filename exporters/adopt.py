"""Someone's .onnx → bundle. Nobody here knows its PyTorch, so the original file, run without graph optimizations, is the
reference: goldens come from it, and its dynamic axes are tried before they are believed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from runtime.bundle import Tolerance, lineage_step
from runtime.errors import EdgekitError, SourceError
from runtime.feeds import Pool, example_feeds
from runtime.files import sha256_of
from runtime.signature import Dim, GraphSignature, TensorSpec

from .disturbed import HOW, disturbed_reference
from .export import ExportReport, GraphProof, Progress, refuse_failures, write_proofs
from .exportable import MODEL
from .graph import read_model, signature_of
from .loading import open_original
from .parity import Arrays, Reference, compare_cases, derive_tolerance
from .reduced import coarse_precision, reduced_tolerance
from .trial_sizes import Runs, Sizes, cases_of, find_moves, first_sizes, tied_axes
from .trial_values import choose_pools, likely_pools

_STARTS: tuple[Pool, ...] = ((0,), (1,))  # what integers are at first, while sizes are looked for


@dataclass(frozen=True)
class Trial:
    """A graph that runs: what it takes, and the cases it was seen to run at, with the answers it gave."""

    signature: GraphSignature
    cases: list[tuple[Sizes, Arrays]]
    answers: list[Arrays]
    whole: frozenset[str]  # inputs that hold whole numbers, whatever their type
    skipped: tuple[str, ...]


def adopt(path: str | Path, target: str | Path, *, force: bool = False, progress: Progress = lambda step: None) -> ExportReport:
    """Write the ONNX file at `path` as a bundle at `target`."""
    path = Path(path)
    progress("reading the model")
    model = read_model(path)
    declared = _signature(path, model)
    session = open_original(path, model, declared)
    progress("looking for sizes and values it takes")
    trial = _try_out(path, model, declared, session.run)
    inputs = [feeds for _, feeds in trial.cases]
    signature = observed_signature(trial.signature, list(zip(inputs, trial.answers, strict=True)))
    for before, after in zip(trial.signature.outputs, signature.outputs, strict=True):
        if before.shape != after.shape:
            progress(f"output {before} gives other sizes than it declares; the bundle says {after}")
    progress("comparing with the original")
    optimized = open_original(path, model, signature, optimization="all")
    moved = disturbed_reference(path, model, signature, trial.whole)
    tolerance = _tolerance(model, session.run, moved, optimized.run, inputs)
    remembered = {id(feeds): answer for feeds, answer in zip(inputs, trial.answers, strict=True)}
    cases = compare_cases(optimized, lambda feeds: remembered[id(feeds)], tolerance, trial.cases)
    refuse_failures(path.name, cases)
    progress("writing the bundle")
    proof = GraphProof(MODEL, model, signature, tuple(cases), tolerance, trial.skipped)
    source = {"kind": "onnx", "file": path.name, "sha256": sha256_of(path), "producer": model.producer_name}
    bundle = write_proofs(
        target, [proof], name=path.stem, task="tensors", lineage=lineage_step("export", None, source=source), force=force
    )
    return ExportReport(bundle, (proof,))


def observed_signature(signature: GraphSignature, runs: list[tuple[Arrays, Arrays]]) -> GraphSignature:
    """The signature with outputs as they came out: a declared size that was untrue in any run becomes a name of its own."""
    bound = [(signature.check_feeds(inputs), outputs) for inputs, outputs in runs]
    specs = []
    for spec in signature.outputs:
        shapes = [(sizes, outputs[spec.name].shape) for sizes, outputs in bound]
        dims: tuple[Dim, ...] = spec.shape
        if any(len(shape) != len(dims) for _, shape in shapes):
            dims = tuple(f"{spec.name}_{axis}" for axis in range(len(shapes[0][1])))
        true = [all(_fits(dim, sizes, shape[axis]) for sizes, shape in shapes) for axis, dim in enumerate(dims)]
        dims = tuple(dim if fits else f"{spec.name}_{axis}" for axis, (dim, fits) in enumerate(zip(dims, true, strict=True)))
        specs.append(TensorSpec(spec.name, spec.dtype, dims))
    return GraphSignature(signature.inputs, tuple(specs), signature.states)


def _fits(dim: Dim, sizes: dict[str, int], size: int) -> bool:
    """Whether `size` is what `dim` promises; a name that no input has is bound by the first output that shows it."""
    return size == (sizes.setdefault(dim, size) if isinstance(dim, str) else dim)


def _tolerance(
    model: onnx.ModelProto, reference: Reference, moved: Reference, optimized: Reference, cases: list[Arrays]
) -> dict[str, Tolerance]:
    if (precision := coarse_precision(model)) is not None:
        return reduced_tolerance(precision, reference, (moved, optimized), cases)
    return derive_tolerance(reference, moved, cases, how=HOW)


def _signature(path: Path, model: onnx.ModelProto) -> GraphSignature:
    try:
        signature = signature_of(model, observed_outputs=True)
    except SourceError as error:
        raise SourceError(f"{path} cannot be adopted: {error}") from error
    for spec in (*signature.inputs, *signature.outputs):
        if spec.dtype == "bfloat16":
            raise SourceError(
                f"{path} cannot be adopted: {spec.name!r} holds bfloat16 values, which numpy has no type for; "
                "cast it to float32 at the graph's edge"
            )
    return signature


def _try_out(path: Path, model: onnx.ModelProto, signature: GraphSignature, reference: Reference) -> Trial:
    """Sizes and values that the original runs with. Declared axes that cannot move are noted: the file is what it is."""
    likely = likely_pools(model, signature)
    integers = [spec.name for spec in signature.inputs if not spec.dtype.startswith("float")]
    starts: list[dict[str, Pool]] = [dict.fromkeys(integers, pool) for pool in _STARTS]
    starts.append({name: pools[0] for name, pools in likely.items() if pools and name in integers})
    for start in starts:
        sizes = first_sizes(signature, _runs_with(signature, start, reference))
        if sizes is None:
            continue
        pools = choose_pools(signature, sizes, likely, reference, start)
        return _vary(signature, sizes, pools, reference)
    fault = _fault(signature, dict.fromkeys(signature.dynamic_axes, 1), starts[0], reference)
    raise SourceError(
        f"{path} runs at none of the sizes tried; at sizes of 1: {fault}; "
        "fix its axes with onnx.tools.update_model_dims to sizes it takes, then export that"
    )


def _vary(signature: GraphSignature, base: Sizes, pools: Mapping[str, Pool], reference: Reference) -> Trial:
    moves = find_moves(base, _runs_with(signature, pools, reference))
    renamed = tied_axes(base, moves)
    cases, answers, skipped = [], [], []
    for seed, sizes in enumerate(cases_of(base, moves)):
        feeds = example_feeds(signature, sizes, seed, pools)
        shown = {axis: size for axis, size in sizes.items() if axis not in renamed}
        try:
            answers.append(reference(feeds))
            cases.append((shown, feeds))
        except EdgekitError as error:
            skipped.append(f"{', '.join(f'{axis}={size}' for axis, size in shown.items())}: {error}")
    whole = frozenset(name for name, pool in pools.items() if isinstance(pool, range))
    return Trial(_renamed(signature, renamed), cases, answers, whole, tuple(skipped))


def _runs_with(signature: GraphSignature, pools: Mapping[str, Pool], reference: Reference) -> Runs:
    return lambda sizes: _fault(signature, sizes, pools, reference) is None


def _fault(signature: GraphSignature, sizes: Sizes, pools: Mapping[str, Pool], reference: Reference) -> str | None:
    """Why the original does not run at these sizes; None if it does."""
    try:
        reference(example_feeds(signature, sizes, 0, pools))
    except EdgekitError as error:
        return str(error)
    return None


def _renamed(signature: GraphSignature, names: Mapping[str, str]) -> GraphSignature:
    """Axes that proved to be one get one name: equal names are equal sizes."""

    def renamed(spec: TensorSpec) -> TensorSpec:
        return TensorSpec(
            spec.name, spec.dtype, tuple(names.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape)
        )

    return GraphSignature(tuple(map(renamed, signature.inputs)), tuple(map(renamed, signature.outputs)), signature.states)
