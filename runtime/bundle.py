"""The bundle: the one thing that travels. A directory with `manifest.json`, ONNX graphs and goldens.

    lenet.bundle/
      manifest.json        what is in here, sealed by its own hash
      model.onnx           one file a graph (and `*.data` beside it for external weights)
      goldens/model-0.npz  inputs with the outputs PyTorch gave

Opening checks every byte before anything is used: the manifest against its seal, every file against its size and sha256,
every path and every external-data pointer against the bundle's own folder. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import AlteredFile, BundleError, NewerFormat
from .files import new_directory, sha256_of
from .onnx_file import external_files
from .signature import GraphSignature

FORMAT = 1
MANIFEST = "manifest.json"
ENCODER, DECODER = "encoder", "decoder"  # the graphs of a network that generates; a language model has the second alone
ALIGNMENT = "alignment"  # on request: the attention of an encoder–decoder to its source
GENERATOR = "generator"  # all of it in one graph, made by edgekit wrap
MANY = "decoder.many"  # the decoder in another form, faster for many tokens in one call
TASKS = ("classification", "regression", "embedding", "language-model", "masked-lm", "seq2seq", "tensors")
_SEAL = re.compile(rb'"seal": "([0-9a-f]{64})"')
_MANIFEST_LIMIT = 64 << 20  # far above any real manifest; a larger file is not one

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class GraphEntry:
    file: str
    signature: GraphSignature
    weights: tuple[str, ...] = ()  # external data files


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be from the golden, and where that number comes from."""

    allowed: float
    measured: float
    derived: str


@dataclass(frozen=True)
class GoldenEntry:
    graph: str
    file: str


@dataclass(frozen=True)
class Manifest:
    name: str
    task: str
    precision: str
    graphs: Mapping[str, GraphEntry]
    goldens: tuple[GoldenEntry, ...]
    tolerance: Mapping[str, Mapping[str, Tolerance]]  # graph → output → tolerance
    requirements: Mapping[str, Any]  # opsets, operators, onnxruntime, cpu_features
    lineage: tuple[Mapping[str, Any], ...]  # the steps that led here, oldest first
    labels: tuple[str, ...] | None = None
    preprocessing: Mapping[str, Any] | None = None  # what a raw input is; the arithmetic itself is inside the graph
    tokenizers: Mapping[str, str] = field(default_factory=dict)  # "text", or "source" and "target" → file
    data: Mapping[str, Any] | None = None  # the data set and split it was trained on
    generation: Mapping[str, Any] | None = None  # decoding defaults, for generating networks
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # path → sha256, bytes; filled when written

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise BundleError(f"task {self.task!r} is not known; a bundle's task is one of: {', '.join(TASKS)}")

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.name,
            "task": self.task,
            "precision": self.precision,
            "graphs": {
                name: {"file": graph.file, "weights": list(graph.weights), "signature": graph.signature.to_json()}
                for name, graph in self.graphs.items()
            },
            "labels": None if self.labels is None else list(self.labels),
            "preprocessing": self.preprocessing,
            "tokenizers": self.tokenizers,
            "data": self.data,
            "generation": self.generation,
            "goldens": [{"graph": golden.graph, "file": golden.file} for golden in self.goldens],
            "tolerance": {
                graph: {name: vars(tolerance) for name, tolerance in outputs.items()}
                for graph, outputs in self.tolerance.items()
            },
            "requirements": self.requirements,
            "lineage": list(self.lineage),
            "files": self.files,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        return cls(
            name=data["name"],
            task=data["task"],
            precision=data["precision"],
            graphs={
                name: GraphEntry(entry["file"], GraphSignature.from_json(entry["signature"]), tuple(entry["weights"]))
                for name, entry in data["graphs"].items()
            },
            goldens=tuple(GoldenEntry(entry["graph"], entry["file"]) for entry in data["goldens"]),
            tolerance={
                graph: {name: Tolerance(**entry) for name, entry in outputs.items()}
                for graph, outputs in data["tolerance"].items()
            },
            requirements=data["requirements"],
            lineage=tuple(data["lineage"]),
            labels=None if data["labels"] is None else tuple(data["labels"]),
            preprocessing=data["preprocessing"],
            tokenizers=data.get("tokenizers", {}),
            data=data["data"],
            generation=data["generation"],
            files=data["files"],
        )


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: every file in it has been checked."""

    root: Path
    manifest: Manifest
    seal: str

    @classmethod
    def open(cls, path: str | Path) -> Bundle:
        root = Path(path)
        document, seal = _read_manifest(root)
        try:
            manifest = Manifest.from_json(document)
            _check_references(manifest)
            for name, entry in manifest.files.items():
                _check_file(root, name, int(entry["bytes"]), str(entry["sha256"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BundleError(f"{root / MANIFEST} lacks or misuses a field ({error!r}); export the bundle again") from error
        for graph in manifest.graphs.values():
            _check_graph_files(root, graph, manifest)
        return cls(root, manifest, seal)

    def graph(self, name: str | None = None) -> tuple[str, GraphEntry]:
        """A graph by name; without one, the only graph there is."""
        graphs = self.manifest.graphs
        if name is None:
            if len(graphs) != 1:
                raise BundleError(f"{self.root.name} has several graphs ({', '.join(graphs)}); name one with graph=…")
            name = next(iter(graphs))
        if name not in graphs:
            raise BundleError(f"{self.root.name} has no graph {name!r}; it has: {', '.join(graphs)}")
        return name, graphs[name]

    def graph_path(self, name: str | None = None) -> Path:
        return self.root / self.graph(name)[1].file

    @property
    def graph_bytes(self) -> int:
        """Size of all graphs with their weights: what a device must store to run the model."""
        names = {name for graph in self.manifest.graphs.values() for name in (graph.file, *graph.weights)}
        return sum(int(self.manifest.files[name]["bytes"]) for name in names)

    def goldens(self) -> Iterator[tuple[GoldenEntry, Arrays, Arrays]]:
        """(entry, inputs, expected outputs) of each golden."""
        for entry in self.manifest.goldens:
            try:
                with np.load(self.root / entry.file, allow_pickle=False) as archive:
                    arrays = {name: archive[name] for name in archive.files}
            except (ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
                raise BundleError(f"{entry.file} of {self.root} is not a golden ({error}); export the bundle again") from error
            inputs = {name.removeprefix("input."): array for name, array in arrays.items() if name.startswith("input.")}
            outputs = {name.removeprefix("output."): array for name, array in arrays.items() if name.startswith("output.")}
            if not outputs or not set(outputs) <= set(self.manifest.tolerance[entry.graph]):
                raise BundleError(f"{entry.file} of {self.root} has outputs without a tolerance; export the bundle again")
            yield entry, inputs, outputs


def write_bundle(target: str | Path, manifest: Manifest, files: Mapping[str, bytes | Path], *, force: bool = False) -> Bundle:
    """Write a bundle whole or not at all. `files` maps a path inside the bundle to its bytes, or to a file to copy."""
    with new_directory(Path(target), force=force, marker=MANIFEST) as aside:
        listed = {}
        for name, content in files.items():
            _refuse_outside(name)
            path = aside / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, path)
            else:
                path.write_bytes(content)
            listed[name] = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
        document = manifest.to_json() | {"files": listed}
        (aside / MANIFEST).write_bytes(_sealed(document))
        Bundle.open(aside)  # what cannot be opened is not written
    return Bundle.open(target)


def pack_golden(inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> bytes:
    buffer = io.BytesIO()
    arrays: Any = {f"input.{name}": array for name, array in inputs.items()}
    arrays |= {f"output.{name}": array for name, array in outputs.items()}
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def lineage_step(step: str, parent: Bundle | None, **details: Any) -> tuple[Mapping[str, Any], ...]:
    """The parent's lineage with one more step."""
    entry = {
        "step": step,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "parent": None if parent is None else parent.seal,
        **details,
    }
    return (*(parent.manifest.lineage if parent else ()), entry)


def is_bundle(path: str | Path) -> bool:
    return (Path(path) / MANIFEST).is_file()


# The seal is the sha256 of the manifest's bytes with the seal's own 64 digits set to zero, so that flipping any byte of the
# manifest, the seal included, is noticed.


def _sealed(document: Mapping[str, Any]) -> bytes:
    unsealed = json.dumps({"seal": "0" * 64, **document}, indent=1, ensure_ascii=False).encode()
    return unsealed.replace(b"0" * 64, hashlib.sha256(unsealed).hexdigest().encode(), 1)


def _read_manifest(root: Path) -> tuple[dict[str, Any], str]:
    path = root / MANIFEST
    if not root.exists():
        raise BundleError(f"there is no bundle at {root}; check the path")
    if not path.is_file():
        raise BundleError(f"{root} is not a bundle: it has no {MANIFEST}; make one with: edgekit export")
    if path.stat().st_size > _MANIFEST_LIMIT:
        raise BundleError(f"{path} is {path.stat().st_size} bytes, too large for a manifest; get the bundle again")
    if not path.resolve().is_relative_to(root.resolve()):
        raise BundleError(f"{path} is a link that leaves the bundle; get the bundle again")
    raw = path.read_bytes()
    found = _SEAL.search(raw[:200])
    unsealed = raw[: found.start(1)] + b"0" * 64 + raw[found.end(1) :] if found else b""
    if found is None or hashlib.sha256(unsealed).hexdigest() != found.group(1).decode():
        raise AlteredFile(f"{MANIFEST} of {root} was altered: its bytes do not match its seal; get the bundle again")
    try:
        document = json.loads(raw)
        version = document["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BundleError(f"{path} is not a manifest; export the bundle again") from None
    if isinstance(version, int) and version > FORMAT:
        raise NewerFormat(f"{path} has bundle format {version}, and this edgekit reads up to {FORMAT}; upgrade edgekit")
    if version != FORMAT:
        raise BundleError(f"{path} has bundle format {version!r}, expected {FORMAT}; export the bundle again")
    return document, found.group(1).decode()


def _check_references(manifest: Manifest) -> None:
    """Everything the manifest names is in the manifest."""
    if not manifest.graphs:
        raise ValueError("there is no graph")
    for file in manifest.tokenizers.values():
        _require_listed(file, manifest)
    for golden in manifest.goldens:
        _require_listed(golden.file, manifest)
        missing = {spec.name for spec in manifest.graphs[golden.graph].signature.outputs} - set(
            manifest.tolerance[golden.graph]
        )
        if missing:
            raise ValueError(f"there is no tolerance for {', '.join(sorted(missing))}")


def _check_file(root: Path, name: str, expected_bytes: int, expected_hash: str) -> None:
    _refuse_outside(name)
    path = root / name
    again = "get the bundle again"
    if not path.is_file():
        raise AlteredFile(f"{name} is missing from {root}; {again}")
    if not path.resolve().is_relative_to(root.resolve()):
        raise BundleError(f"{name} of {root} is a link that leaves the bundle; {again}")
    if (size := path.stat().st_size) != expected_bytes:
        raise AlteredFile(f"{name} of {root} has {size} bytes but the manifest lists {expected_bytes}; {again}")
    if sha256_of(path) != expected_hash:
        raise AlteredFile(f"{name} of {root} was altered: its sha256 is not the one in the manifest; {again}")


def _check_graph_files(root: Path, graph: GraphEntry, manifest: Manifest) -> None:
    _require_listed(graph.file, manifest)
    folder = PurePosixPath(graph.file).parent
    for location in external_files(root / graph.file):
        name = str(folder / location)
        _refuse_outside(name)
        if name not in graph.weights:
            raise BundleError(f"{graph.file} of {root} reads weights from {location!r}, which the manifest does not list")
        _require_listed(name, manifest)


def _require_listed(name: str, manifest: Manifest) -> None:
    _refuse_outside(name)
    if name not in manifest.files:
        raise BundleError(f"{name} is used but not listed under 'files' in {MANIFEST}; export the bundle again")


def _refuse_outside(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or name in ("", "."):
        raise BundleError(f"{name!r} points outside the bundle; only files inside it may be named")
