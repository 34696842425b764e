"""Bundle → bundle: a network that generates becomes one graph that does, if it gives the answers of the loop outside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from runtime.bundle import (
    ENCODER,
    GENERATOR,
    Bundle,
    GoldenEntry,
    GraphEntry,
    Manifest,
    lineage_step,
    pack_golden,
    write_bundle,
)
from runtime.errors import OptionError, ParityRefused
from runtime.generation.wrapped import ROOM
from runtime.model import Model

from ..graph import requirements_of
from ..weights import pack_graphs
from .in_graph import Parts, generator_graph
from .law import compare, tolerances

_GOLDENS = 3
_LARGE = 1 << 30  # bytes of weights; a graph with more is not written to one file


@dataclass(frozen=True)
class WrapReport:
    name: str
    beams: int
    texts: int  # that were generated both ways
    ties: int  # of them, differ because of a tie within noise
    error: float  # of a log-probability or score, at most
    goldens: int  # texts that travel with the bundle
    bytes_before: int
    bytes_after: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def wrap(
    bundle: Bundle,
    target: str | Path,
    *,
    beams: int = 1,
    max_new_tokens: int | None = None,
    force: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> WrapReport:
    """Write the wrapped bundle at `target`, or raise ParityRefused where it answers otherwise than `bundle` itself.

    `max_new_tokens` is the number where a caller does not give one.
    """
    _refuse_request(bundle, beams, max_new_tokens)
    progress("building the graph")
    parts = Parts.of(bundle)
    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
        manifest, files = _draft(bundle, parts, beams, max_new_tokens, Path(folder))
        candidate = write_bundle(Path(folder) / "candidate.bundle", manifest, files)
        with Model(bundle, device="cpu") as host, Model(candidate, device="cpu") as wrapped:
            progress("comparing it with the loop outside the graph")
            found = compare(host, wrapped, beams)
            if found.problem:
                raise ParityRefused(f"{manifest.name} was not wrapped: {found.problem}")
            progress("choosing goldens")
            cases, withstood = found.goldens(_GOLDENS)
        goldens = {f"goldens/{GENERATOR}-{number}.npz": pack_golden(*case) for number, case in enumerate(cases)}
        if not goldens:
            raise ParityRefused(
                f"{manifest.name} was not wrapped: every text is a tie within the noise of {withstood:.1e}, so none can be a "
                "golden; wrap a network with trained weights"
            )
        report = WrapReport(
            manifest.name,
            beams,
            texts=len(found.texts),
            ties=len(found.ties),
            error=found.error,
            goldens=sum(len(inputs[manifest.graphs[GENERATOR].signature.inputs[0].name]) for inputs, _ in cases),
            bytes_before=bundle.graph_bytes,
            bytes_after=candidate.graph_bytes,
        )
        final = replace(
            manifest,
            goldens=tuple(GoldenEntry(GENERATOR, file) for file in goldens),
            tolerance={GENERATOR: tolerances(found, withstood)},
            lineage=lineage_step("wrap", bundle, **report.to_json()),
        )
        write_bundle(target, final, files | goldens, force=force)
    return report


def _refuse_request(bundle: Bundle, beams: int, max_new_tokens: int | None) -> None:
    for name, value in (("beams", beams), ("max_new_tokens", max_new_tokens)):
        if value is not None and value < 1:
            raise OptionError(f"{name} is {value}, expected 1 or more")
    if GENERATOR in bundle.manifest.graphs:
        raise OptionError(f"{bundle.root.name} is already wrapped; wrap the bundle it was made from")


def _draft(
    bundle: Bundle, parts: Parts, beams: int, max_new_tokens: int | None, folder: Path
) -> tuple[Manifest, dict[str, bytes | Path]]:
    """The manifest, without goldens, and the files of the wrapped bundle."""
    old = bundle.manifest
    model, signature = generator_graph(parts, beams)
    files, weights = pack_graphs({GENERATOR: model}, folder, external=bundle.graph_bytes > _LARGE, once=True)
    files |= {file: bundle.root / file for file in old.tokenizers.values()}
    generation = {key: value for key, value in (old.generation or {}).items() if key in ("bos", "eos", "pad", "longest")}
    generation |= {"beams": beams, ROOM: max_new_tokens, "positions": parts.positions}
    if ENCODER not in old.graphs:
        generation["vocabulary"] = (
            parts.marks.vocabulary
        )  # of what it takes, which nothing else says where there is no tokenizer
    requirements = requirements_of(model) | {"cpu_features": old.requirements.get("cpu_features", [])}
    graph = GraphEntry(f"{GENERATOR}.onnx", signature, weights[GENERATOR])
    manifest = replace(
        old, graphs={GENERATOR: graph}, goldens=(), tolerance={}, requirements=requirements, generation=generation, files={}
    )
    return manifest, files
