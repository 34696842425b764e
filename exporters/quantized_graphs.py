"""The graphs of a bundle, quantized: each in the form that suits how it is used.

A decoder takes a row or a few at a time, an encoder whole texts. Where a scheme has a form for many rows, graphs that read
whole texts take that one, and a decoder comes in both: `decoder`, and `decoder.many` for prompts and large batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import onnx

from runtime.bundle import DECODER, MANY, Bundle, GoldenEntry, Manifest, lineage_step
from runtime.errors import EdgekitError, QuantizationRefused
from runtime.signature import GraphSignature

from .calibration import Statistics
from .graph import operators_of, read_without_weights, requirements_of
from .quantizers import scheme_for
from .quantizers.scheme import Calibration, NodeDecision, Remark, Request, Scheme, decide_all, quantizable
from .quantizers.weights import tied_tables, without_needless_copies
from .weights import pack_graphs, read_mapped

# A search converts one bundle many times, and what its activations are like does not change with it.
_GATHERED: WeakKeyDictionary[Calibration, dict[tuple[str, str], Statistics]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Converted:
    models: dict[str, onnx.ModelProto]
    nodes: tuple[NodeDecision, ...]

    def without(self, name: str) -> Converted:
        return replace(self, models={key: model for key, model in self.models.items() if key != name})


@dataclass(frozen=True)
class Part:
    """One scheme on some nodes of a bundle. Several parts, one after the other, mix schemes."""

    scheme: str
    settings: Any = None  # None: the scheme's own
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    nodes: frozenset[str] | None = None  # by the names that decisions give them; None: all that the scheme can take


def convert(
    bundle: Bundle,
    scheme: str,
    only: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    calibration: Calibration | None = None,
    settings: Any = None,
) -> Converted:
    return convert_parts(bundle, (Part(scheme, settings, only, exclude),), calibration)


def convert_parts(
    bundle: Bundle,
    parts: Sequence[Part],
    calibration: Calibration | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Converted:
    """Every node goes to the first part that takes it."""
    models = {name: quantizable(read_mapped(bundle.graph_path(name))) for name in bundle.manifest.graphs}
    schemes = [scheme_for(part.scheme, bundle.manifest) for part in parts]
    for scheme in schemes:
        models = {name: scheme.prepare(model) for name, model in models.items()}
    known: dict[str, NodeDecision] = {}
    work = []
    for part, scheme in zip(parts, schemes, strict=True):
        decisions = decisions_of(models, scheme, part, {label for label, decision in known.items() if decision.quantized})
        work.append((part, scheme, decisions))
        for of_graph in decisions.values():
            for label, decision in of_graph.items():
                if label not in known or not known[label].quantized:
                    known[label] = replace(decision, node=label)
    for part, scheme, decisions in sorted(work, key=lambda item: _turn(item[1])):
        joined = _joined(models, decisions)
        known |= joined
        decisions = {
            name: {**of_graph, **{label: joined[label] for label in of_graph if label in joined}}
            for name, of_graph in decisions.items()
        }
        models, remarks = _with_part(bundle, part, scheme, models, decisions, calibration, progress)
        for label, remark in remarks.items():
            reason = f"{known[label].reason}; {remark.text}"
            known[label] = replace(known[label], reason=reason, cpu_features=remark.cpu_features)
    models = {name: without_needless_copies(model) for name, model in models.items()}
    return Converted(models, tuple(known.values()))


def _joined(
    models: Mapping[str, onnx.ModelProto], decisions: Mapping[str, Mapping[str, NodeDecision]]
) -> dict[str, NodeDecision]:
    """What an earlier part has made part of another node, as a bias of the product before it: nothing is left to quantize."""
    found = {}
    for name, of_graph in decisions.items():
        present = {node.name for node in models[name].graph.node}
        for label, decision in of_graph.items():
            if decision.quantized and decision.node not in present:
                reason = "part of the product before it" if decision.operator == "Add" else "part of the layer that reads it"
                found[label] = replace(decision, node=label, quantized=False, reason=reason, scheme=None)
    return found


def _turn(scheme: Scheme) -> int:
    """onnxruntime's own quantizers go first: they do not know the operators that the others make."""
    return ("int8-static", "int8-dynamic", scheme.name).index(scheme.name)


def decisions_of(
    models: Mapping[str, onnx.ModelProto], scheme: Scheme, part: Part, taken: Collection[str]
) -> dict[str, dict[str, NodeDecision]]:
    """Graph → what a report calls a node → whether this part takes it, and why."""
    several = len(models) > 1
    found: dict[str, dict[str, NodeDecision]] = {}
    for name, decisions in decide_all(scheme, models, part.only, part.exclude, part.settings).items():
        found[name] = {}
        for decision in decisions:
            label = f"{name}: {decision.node}" if several else decision.node
            left = decision.quantized and (label in taken or (part.nodes is not None and label not in part.nodes))
            found[name][label] = replace(decision, quantized=False, reason="left out", scheme=None) if left else decision
    return found


def _with_part(
    bundle: Bundle,
    part: Part,
    scheme: Scheme,
    models: Mapping[str, onnx.ModelProto],
    decisions: Mapping[str, Mapping[str, NodeDecision]],
    calibration: Calibration | None,
    progress: Callable[[str], None],
) -> tuple[dict[str, onnx.ModelProto], dict[str, Remark]]:
    """The models, and what was found out about nodes, by the names that decisions give them."""
    tied = tied_tables(models.values()) if scheme.takes_text else frozenset()
    made = dict(models)
    remarks: dict[str, Remark] = {}
    for name, model in models.items():
        source = DECODER if name == MANY else name
        present = {node.name for node in model.graph.node}
        quantized = [decision for decision in decisions[source].values() if decision.quantized and decision.node in present]
        if not quantized:
            continue
        labels = {decision.node: label for label, decision in decisions[source].items()}
        request = Request(
            model=model,
            nodes=tuple(decision.node for decision in quantized),
            operators=tuple(sorted({decision.operator for decision in quantized})),
            narrowed=bool(part.only or part.exclude),
            calibration=None if calibration is None else partial(calibration, source),
            settings=scheme.settings if part.settings is None else part.settings,
            statistics=None if calibration is None else _statistics(bundle, source, calibration),
            remark=partial(_note, remarks, labels),
            progress=progress if len(models) == 1 else partial(_tell, progress, name),
            many_rows=scheme.has_many_rows and (name == MANY or _reads_whole_texts(bundle.manifest.graphs[name].signature)),
            large_batch=name == MANY,
            tied=tied,
            by_node=part.nodes is not None,
        )
        made[name] = _apply(scheme, request)
        if name == DECODER and scheme.has_many_rows and MANY not in models:
            made[MANY] = _apply(scheme, replace(request, many_rows=True, large_batch=True))
    return made, remarks


def _statistics(bundle: Bundle, graph: str, calibration: Calibration) -> Statistics:
    return _GATHERED.setdefault(calibration, {}).setdefault((bundle.seal, graph), Statistics())


def _note(remarks: dict[str, Remark], labels: Mapping[str, str], remark: Remark) -> None:
    remarks[labels[remark.node]] = remark


def _tell(progress: Callable[[str], None], graph: str, line: str) -> None:
    progress(f"{graph}: {line}")


def _apply(scheme: Scheme, request: Request) -> onnx.ModelProto:
    try:
        return scheme.apply(request)
    except EdgekitError:
        raise
    except Exception as error:  # a quantizer's own failure on a graph it does not understand
        reason = " ".join(str(error).split())[:300]
        raise QuantizationRefused(f"{scheme.name} cannot be applied to this graph: {type(error).__name__}: {reason}") from error


def _reads_whole_texts(signature: GraphSignature) -> bool:
    first = signature.inputs[0]
    return not signature.states and first.dtype == "int64" and len(first.shape) == 2


def draft(bundle: Bundle, converted: Converted, scheme: str, folder: Path) -> tuple[Manifest, dict[str, bytes | Path]]:
    """The manifest and files of the candidate: the parent's goldens, tokenizers and labels with the new graphs. Large
    files are written in `folder`."""
    old = bundle.manifest
    packed, weights = pack_graphs(converted.models, folder, once=True)
    sources = {name: DECODER if name == MANY else name for name in converted.models}
    graphs = {name: replace(old.graphs[source], file=f"{name}.onnx", weights=weights[name]) for name, source in sources.items()}
    goldens = [
        GoldenEntry(name, golden.file) for name, source in sources.items() for golden in old.goldens if golden.graph == source
    ]
    requirements = requirements_of(*converted.models.values())
    requirements["cpu_features"] = list(dict.fromkeys(name for node in converted.nodes for name in node.cpu_features))
    replaced = {name for graph in old.graphs.values() for name in (graph.file, *graph.weights)}
    others: dict[str, bytes | Path] = {name: bundle.root / name for name in old.files if name not in replaced}
    manifest = replace(
        old,
        graphs=graphs,
        goldens=tuple(goldens),
        tolerance={name: old.tolerance[source] for name, source in sources.items() if source in old.tolerance},
        precision=scheme,
        requirements=requirements,
        lineage=lineage_step("quantize", bundle, scheme=scheme),
    )
    return manifest, {**packed, **others}


def _operators(model: onnx.ModelProto) -> dict[str, int]:
    """Without constants, which become weights before anything is quantized."""
    return {name: count for name, count in operators_of(model).items() if name != "Constant"}


def refuse_unchanged(before: Bundle, after: Bundle, converted: Converted, scheme: str) -> None:
    changed = any(
        name not in before.manifest.graphs or _operators(model) != _operators(read_without_weights(before.graph_path(name)))
        for name, model in converted.models.items()
    )
    if not changed and scheme != "fp16":
        raise QuantizationRefused(f"{scheme} changed no operator of this graph, so it would do nothing")
    if after.graph_bytes >= before.graph_bytes:
        raise QuantizationRefused(
            f"{scheme} does not make it smaller: {before.graph_bytes:,} → {after.graph_bytes:,} bytes; it holds too few weights"
        )
