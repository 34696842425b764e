"""Network → bundle. Every graph is compared with PyTorch before anything is written; one that differs is not written."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

from architectures.run_directory import tokenizer_file
from runtime.bundle import Bundle, GoldenEntry, GraphEntry, Manifest, Tolerance, lineage_step, pack_golden, write_bundle
from runtime.errors import ParityRefused, SourceError
from runtime.signature import GraphSignature
from runtime.text import BOS, EOS, Tokenizer

from .diagnose import diagnose
from .exportable import Exportable, Generator, GraphSource
from .found_axes import prove_found_axes
from .graph import precision_of, requirements_of, signature_of
from .laws import LawResult, check_laws, refuse_broken_laws, texts_for
from .parity import (
    Arrays,
    Case,
    compare_cases,
    derive_tolerance,
    fresh_inputs,
    fuzz_cases,
    precise_reference,
    remembering,
    torch_reference,
)
from .profiles import PORTABLE
from .trace import DEFAULT_OPSET, examples_of, model_of, reason_of, trace
from .weights import open_model, pack_graphs

_GOLDENS = 3
_GOLDEN_BYTES = 8 << 20  # a golden is a proof to carry, not a data set
_LARGE = 20_000_000  # weights; from there on the float64 reference is computed for every third case only
_MIN_SIZES = 3  # fresh sizes an axis must have been tried at before it may be called dynamic

Progress = Callable[[str], None]


@dataclass(frozen=True)
class GraphProof:
    """A traced graph and how it compared with its original."""

    name: str
    model: onnx.ModelProto
    signature: GraphSignature
    cases: tuple[Case, ...]
    tolerance: Mapping[str, Tolerance]
    refused_by_reference: tuple[str, ...]  # sizes at which the original itself fails, which proves nothing either way


@dataclass(frozen=True)
class ExportReport:
    bundle: Bundle
    graphs: tuple[GraphProof, ...]
    laws: tuple[LawResult, ...] = ()  # of decoding, for networks that generate
    profile: str = PORTABLE

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(case for graph in self.graphs for case in graph.cases)

    @property
    def tolerance(self) -> dict[str, Tolerance]:
        return {name: tolerance for graph in self.graphs for name, tolerance in graph.tolerance.items()}

    @property
    def refused_by_reference(self) -> tuple[str, ...]:
        return tuple(text for graph in self.graphs for text in graph.refused_by_reference)

    def to_json(self) -> dict[str, Any]:
        return {
            "bundle": str(self.bundle.root),
            "passed": True,
            "bytes": self.bundle.graph_bytes,
            "tolerance": {name: vars(tolerance) for name, tolerance in self.tolerance.items()},
            "cases": [
                {
                    "graph": graph.name,
                    "sizes": dict(case.sizes),
                    "errors": {item.output: item.error for item in case.comparisons},
                }
                for graph in self.graphs
                for case in graph.cases
            ],
            "refused_by_reference": list(self.refused_by_reference),
            "laws": [vars(law) for law in self.laws],
            "profile": self.profile,
        }

    def worst(self, output: str) -> float:
        return max(item.error for case in self.cases for item in case.comparisons if item.output == output)


def export(
    network: Exportable,
    target: str | Path,
    *,
    opset: int = DEFAULT_OPSET,
    thorough: bool = False,
    external_data: bool = False,
    force: bool = False,
    progress: Progress = lambda step: None,
) -> ExportReport:
    """Write `network` as a bundle at `target`, proved equal to PyTorch; `thorough` tries more sizes and texts."""
    for text in network.notes:
        progress(text)
    lineage = lineage_step(
        "export",
        None,
        source=dict(network.source),
        profile=network.profile,
        opset=opset,
        torch=torch.__version__,
        onnx=onnx.__version__,
    )
    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:  # for weights that are too large to be kept inside a graph
        prove = Prover(opset, thorough, Path(folder), progress)
        several = len(network.graphs) > 1
        proofs = []
        for graph in network.graphs:
            label = f"{network.name}'s {graph.name}" if several else network.name
            proofs.append(prove_found_axes(graph, partial(prove, label=label), progress))
            if weights_of(graph.module) >= _LARGE:
                gc.collect()  # what was traced refers to itself in circles, and holds all weights
        _refuse_other_task(network, proofs[0].signature)
        laws: tuple[LawResult, ...] = ()
        if network.generator is not None:
            progress("checking the laws of decoding")
            texts = texts_for(network.generator, {proof.name: proof.signature for proof in proofs}, thorough=thorough)
            sessions = {proof.name: open_model(proof.model, proof.signature) for proof in proofs}
            laws = check_laws(network.generator, sessions, texts)
            del sessions
            refuse_broken_laws(network.name, laws)
        progress("writing the bundle")
        bundle = write_proofs(
            target,
            proofs,
            name=network.name,
            task=network.task,
            lineage=lineage,
            labels=network.labels,
            preprocessing=network.preprocessing,
            data=network.data,
            generation=_generation(network.generator, network.tokenizers),
            tokenizers=network.tokenizers,
            external_data=external_data,
            force=force,
        )
    return ExportReport(bundle, tuple(proofs), laws, network.profile)


def _generation(about: Generator | None, tokenizers: Mapping[str, Tokenizer]) -> dict[str, Any] | None:
    """What a host must know to decode: special tokens, and how long a text may get."""
    if about is None:
        return None
    bos, eos = (BOS, EOS) if tokenizers else (None, None)  # without a tokenizer nobody knows
    return {"bos": bos, "eos": eos, "pad": about.pad if about.pad >= 0 else None, "longest": about.longest}


def write_proofs(
    target: str | Path,
    proofs: list[GraphProof],
    *,
    force: bool,
    tokenizers: Mapping[str, Tokenizer] | None = None,
    external_data: bool = False,
    **about: Any,
) -> Bundle:
    """The bundle of proved graphs with their goldens; `about` are further fields of the manifest."""
    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
        models = {proof.name: proof.model for proof in proofs}
        files, weights = pack_graphs(models, Path(folder), external=external_data)
        tokenizer_files = {name: tokenizer_file(name) for name in tokenizers or {}}
        files |= {tokenizer_files[name]: tokenizer.to_json().encode() for name, tokenizer in (tokenizers or {}).items()}
        entries = []
        for proof in proofs:
            goldens = choose_goldens(proof.name, proof.cases)
            files |= goldens
            entries += [GoldenEntry(proof.name, file) for file in goldens]
        manifest = Manifest(
            precision=precision_of(*(proof.model for proof in proofs)),
            graphs={proof.name: GraphEntry(f"{proof.name}.onnx", proof.signature, weights[proof.name]) for proof in proofs},
            tokenizers=tokenizer_files,
            goldens=tuple(entries),
            tolerance={proof.name: proof.tolerance for proof in proofs},
            requirements=requirements_of(*(proof.model for proof in proofs)),
            **about,
        )
        return write_bundle(target, manifest, files, force=force)


class Prover:
    """Traces graphs and compares them with PyTorch at sizes the tracer never saw."""

    def __init__(self, opset: int, thorough: bool, folder: Path, progress: Progress) -> None:
        self.opset, self.thorough, self.folder, self.progress = opset, thorough, folder, progress

    def __call__(self, graph: GraphSource, label: str) -> GraphProof:
        self.progress(f"tracing {label}")
        program = trace(graph, label, opset=self.opset)
        model = model_of(program, graph, self.folder)
        signature = signature_of(model, graph.states)
        _refuse_frozen_axes(graph, label, signature)
        self.progress(f"comparing {label} with PyTorch")
        live = torch_reference(graph)
        reference = remembering(live)
        inputs, skipped = _runnable_cases(graph, signature, reference, self.thorough)
        some = [feeds for _, feeds in inputs][:: 1 if weights_of(graph.module) < _LARGE else 3]
        tolerance = derive_tolerance(reference, precise_reference(graph), some, again=live)
        cases = compare_cases(open_model(model, signature), reference, tolerance, inputs)
        if graph.axes_were_found and graph.dynamic_axes:
            refuse_failures(label, cases)  # to be tried again with fewer
        refuse_failures(label, cases, lambda case: diagnose(graph, model, signature, case, tolerance, program).text())
        return GraphProof(graph.name, model, signature, tuple(cases), tolerance, skipped)


def choose_goldens(graph: str, cases: tuple[Case, ...]) -> dict[str, bytes]:
    """The first few cases that fit, as files: one step of several rows if there is one, which is what a decoder does most; then
    in the order they were tried, small batches at the example's other sizes."""
    goldens: dict[str, bytes] = {}
    room = _GOLDEN_BYTES
    step = next((case for case in cases if case.sizes.get("time") == 1 and case.sizes.get("batch", 1) > 1), None)
    for case in [*([step] if step else []), *(case for case in cases if case is not step)]:
        if len(goldens) == _GOLDENS or (goldens and _bytes_of(case) > room):
            break
        room -= _bytes_of(case)
        goldens[f"goldens/{graph}-{len(goldens)}.npz"] = pack_golden(case.inputs, case.expected)
    return goldens


def refuse_failures(label: str, cases: list[Case], explain: Callable[[Case], str] = lambda case: "") -> None:
    """Raise ParityRefused for the smallest failing case; `explain` says more about it."""
    failed = [case for case in sorted(cases, key=_bytes_of) if not case]
    if not failed:
        return
    worst = next(item for item in failed[0].comparisons if not item)
    text = (
        f"{label} was not written: the graph disagrees with the original in {len(failed)} of {len(cases)} cases; "
        f"smallest: at {failed[0]}, output {worst.output!r}: {worst.problem} (allowed {worst.allowed:.2e})"
    )
    reason = explain(failed[0])
    refusal = ParityRefused(f"{text}. {reason}" if reason else text)
    refusal.failed_sizes = tuple(case.sizes for case in failed)
    raise refusal


def _runnable_cases(
    graph: GraphSource, signature: GraphSignature, reference: Callable[[Arrays], Arrays], thorough: bool
) -> tuple[list[tuple[dict[str, int], Arrays]], tuple[str, ...]]:
    """The fuzz cases that PyTorch itself can run, and a note on those it cannot."""
    examples: dict[str, NDArray[Any]] = {name: tensor.numpy() for name, tensor in examples_of(graph).items()}
    axes: dict[str, int] = {}
    for name, entry in graph.dynamic_axes.items():
        for axis, label in entry.items():
            axes.setdefault(label, int(np.shape(examples[name])[axis]))
    runnable, skipped = [], []
    for seed, wanted in enumerate(fuzz_cases(axes, thorough=thorough)):
        try:
            feeds = _fresh(graph, signature, examples, wanted, seed, reference)
        except Exception as error:  # the original's own limit, such as a kernel larger than a 1x1 image
            skipped.append(f"{', '.join(f'{axis}={size}' for axis, size in wanted.items())}: {reason_of(error)}")
        else:
            runnable.append((signature.check_feeds(feeds), feeds))
    for label, example in axes.items():
        tried = {sizes[label] for sizes, _ in runnable if sizes[label] != example}
        if len(tried) < _MIN_SIZES:
            raise SourceError(
                f"axis {label!r} is declared dynamic, but PyTorch itself runs at only {len(tried)} other sizes ({skipped[0]}); "
                "declare it fixed by leaving it out of dynamic_axes"
            )
    return runnable, tuple(skipped)


def _fresh(
    graph: GraphSource,
    signature: GraphSignature,
    examples: Mapping[str, NDArray[Any]],
    sizes: Mapping[str, int],
    seed: int,
    reference: Callable[[Arrays], Arrays],
) -> Arrays:
    """Inputs of these sizes that the original runs on; it raises what the original raises."""
    if graph.draw is not None:
        feeds = {name: tensor.numpy() for name, tensor in graph.draw(sizes, seed).items()}
        reference(feeds)
        return feeds
    if seed % 2 == 0:  # every other case goes beyond what the examples show, where the original can follow
        feeds = fresh_inputs(signature, examples, sizes, seed, beyond=True)
        try:
            if not any(np.isnan(array).any() for array in reference(feeds).values() if array.dtype.kind == "f"):
                return feeds
        except Exception:  # an index out of range, say: back to values like the examples'
            pass
    feeds = fresh_inputs(signature, examples, sizes, seed)
    reference(feeds)
    return feeds


def _refuse_other_task(network: Exportable, signature: GraphSignature) -> None:
    """A task is a promise about the first output."""
    spec = signature.outputs[0]
    if network.task == "classification":
        classes = spec.shape[-1] if len(spec.shape) == 2 else None
        if not isinstance(classes, int) or classes < 2:
            raise SourceError(
                f"the task is classification, but the first output is {spec}; expected [batch, classes] with 2 or more classes"
            )
        if network.labels is not None and len(network.labels) != classes:
            raise SourceError(
                f"there are {len(network.labels)} labels but {spec} has {classes} classes; give one label for each"
            )
    if network.task == "regression" and spec.shape[1:] not in ((), (1,)):
        raise SourceError(
            f"the task is regression, but the first output is {spec}; expected [batch] or [batch, 1], or use task='tensors'"
        )


def _refuse_frozen_axes(graph: GraphSource, label: str, signature: GraphSignature) -> None:
    declared = {spec.name: spec.shape for spec in signature.inputs}
    for name, axes in graph.dynamic_axes.items():
        if name not in declared:
            raise ParityRefused(
                f"{label} was not written: input {name!r} is not used by the network and vanished from the graph"
            )
        for axis, axis_name in axes.items():
            if isinstance(declared[name][axis], int):
                refusal = ParityRefused(
                    f"{label} was not written: axis {axis} ({axis_name!r}) of {name!r} was frozen at "
                    f"{declared[name][axis]} while tracing; the network's code depends on that size"
                )
                refusal.frozen_axis = axis_name
                raise refusal


def weights_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _bytes_of(case: Case) -> int:
    return sum(array.nbytes for array in (*case.inputs.values(), *case.expected.values()))
