"""The graphs of a bundle, quantized: each in the form that suits how it is used.

A decoder takes a row or a few at a time, an encoder whole texts. Where a scheme has a form for many rows, graphs that read
whole texts take that one, and a decoder comes in both: `decoder`, and `decoder.many` for prompts and large batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from runtime.bundle import DECODER, MANY, Bundle, GoldenEntry, Manifest, lineage_step
from runtime.errors import EdgekitError, QuantizationRefused
from runtime.machine import cpu_features
from runtime.signature import GraphSignature

from .graph import operators_of, read_model, requirements_of
from .quantizers import SCHEMES
from .quantizers.scheme import Calibration, NodeDecision, Request, Scheme, decide_all, with_node_names
from .quantizers.weights import tied_tables
from .weights import pack_graphs

_INT8_FEATURES = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")


@dataclass(frozen=True)
class Converted:
    models: dict[str, onnx.ModelProto]
    nodes: tuple[NodeDecision, ...]

    def without(self, name: str) -> Converted:
        return replace(self, models={key: model for key, model in self.models.items() if key != name})


def convert(
    bundle: Bundle,
    scheme: str,
    only: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    calibration: Calibration | None = None,
    settings: Any = None,
) -> Converted:
    chosen = SCHEMES[scheme]
    originals = {name: chosen.prepare(with_node_names(read_model(bundle.graph_path(name)))) for name in bundle.manifest.graphs}
    decisions = decide_all(chosen, originals, only, exclude)
    tied = tied_tables(originals.values()) if chosen.takes_text else frozenset()
    models: dict[str, onnx.ModelProto] = {}
    for name, model in originals.items():
        quantized = [decision for decision in decisions[name] if decision.quantized]
        if not quantized:
            models[name] = model
            continue
        request = Request(
            model=model,
            nodes=tuple(decision.node for decision in quantized),
            operators=tuple(sorted({decision.operator for decision in quantized})),
            narrowed=bool(only or exclude),
            calibration=None if calibration is None else partial(calibration, name),
            settings=chosen.settings if settings is None else settings,
            many_rows=chosen.has_many_rows and _reads_whole_texts(bundle.manifest.graphs[name].signature),
            tied=tied,
        )
        models[name] = _apply(chosen, request)
        if name == DECODER and chosen.has_many_rows:
            models[MANY] = _apply(chosen, replace(request, many_rows=True))
    several = len(originals) > 1
    nodes = (replace(item, node=f"{name}: {item.node}") if several else item for name in decisions for item in decisions[name])
    return Converted(models, tuple(nodes))


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


def draft(bundle: Bundle, converted: Converted, scheme: str) -> tuple[Manifest, dict[str, bytes | Path]]:
    """The manifest and files of the candidate: the parent's goldens, tokenizers and labels with the new graphs."""
    old = bundle.manifest
    packed, weights = pack_graphs(converted.models, once=True)
    sources = {name: DECODER if name == MANY else name for name in converted.models}
    graphs = {name: replace(old.graphs[source], file=f"{name}.onnx", weights=weights[name]) for name, source in sources.items()}
    goldens = [
        GoldenEntry(name, golden.file) for name, source in sources.items() for golden in old.goldens if golden.graph == source
    ]
    requirements = requirements_of(*converted.models.values())
    if scheme.startswith("int8"):
        requirements["cpu_features"] = [feature for feature in cpu_features() if feature in _INT8_FEATURES]
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


def refuse_unchanged(before: Bundle, after: Bundle, converted: Converted, scheme: str) -> None:
    changed = any(
        name not in before.manifest.graphs or operators_of(model) != operators_of(read_model(before.graph_path(name)))
        for name, model in converted.models.items()
    )
    if not changed and scheme != "fp16":
        raise QuantizationRefused(f"{scheme} changed no operator of this graph, so it would do nothing")
    if after.graph_bytes >= before.graph_bytes:
        raise QuantizationRefused(
            f"{scheme} does not make it smaller: {before.graph_bytes:,} → {after.graph_bytes:,} bytes; it holds too few weights"
        )
