"""Where weights are kept: inside their graph, or in one file beside all graphs of a bundle.

Tensors that several graphs share (an embedding, a table of positions) are always kept in that file, once; so are all large ones
of a graph that no message can hold. While a large graph is worked on, its weights stay in files too (tensors.py).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import onnx
from onnx import TensorProto

from runtime.session import Session
from runtime.signature import GraphSignature

from .graph import copy_of, load_weights, read_model, read_without_weights, refuse_missing_weights
from .tensors import Place, bytes_of, data_of, is_mapped, large_tensors, map_in_place, place_of, pointing

WEIGHTS_FILE = "weights.data"
LARGE = 512 << 20  # bytes of a graph, several of which would be too much to keep in memory
LARGEST_INLINE = 1_900_000_000  # bytes of weights; what else is in the message must fit below 2 GB too
_ALIGNMENT = 4096  # of a tensor in the file: one page, so that it can be mapped


def read_mapped(path: Path) -> onnx.ModelProto:
    """As `read_model`; the weights of a large graph that are in files beside it are mapped from there."""
    model = read_without_weights(path)
    refuse_missing_weights(path)
    map_in_place(model, path.parent)
    mapped = [tensor for tensor in model.graph.initializer if is_mapped(tensor)]
    if sum(map(bytes_of, mapped)) < LARGE:
        return read_model(path)
    for tensor in mapped:
        tensor.data_location = TensorProto.DEFAULT  # passed over by what comes now
    load_weights(model, path)
    for tensor in mapped:
        tensor.data_location = TensorProto.EXTERNAL
    return model


def loaded(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model with all weights inside it, for libraries that look for them there."""
    copied = copy_of(model)
    for tensor in copied.graph.initializer:
        if is_mapped(tensor):
            data = bytes(data_of(tensor))
            del tensor.external_data[:]
            tensor.data_location = TensorProto.DEFAULT
            tensor.raw_data = data
    return copied


def size_of(model: onnx.ModelProto) -> int:
    """Bytes of the graph and of the weights it maps."""
    return model.ByteSize() + sum(bytes_of(tensor) for tensor in model.graph.initializer if is_mapped(tensor))


def weight_bytes(model: onnx.ModelProto) -> int:
    return sum(map(bytes_of, large_tensors(model)))


def is_large(model: onnx.ModelProto) -> bool:
    """Whether its weights are better kept in files while it is worked on."""
    return weight_bytes(model) >= LARGE


def moved_out(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """A copy with the large weights that are inside `model` in the file `path`, and mapped from there."""
    with path.open("wb") as stream:
        inside = (tensor for tensor in large_tensors(model) if not is_mapped(tensor))
        return pointing(model, {tensor.name: (str(path.absolute()), *_written(tensor, stream)) for tensor in inside})


def pack_graphs(
    models: Mapping[str, onnx.ModelProto], folder: Path, *, external: bool = False, once: bool = False
) -> tuple[dict[str, bytes | Path], dict[str, tuple[str, ...]]]:
    """Files of the graphs, `NAME.onnx` and perhaps WEIGHTS_FILE, which is written in `folder`; and for each graph the weight
    files it reads.

    With `external` every large tensor goes to the weights file, not only those that are shared; with `once` those too that one
    graph holds twice, perhaps in different shapes.
    """
    keys = {name: {tensor.name: _key(tensor) for tensor in large_tensors(model)} for name, model in models.items()}
    owners: dict[str, int] = {}
    for of_graph in keys.values():
        for key in of_graph.values() if once else set(of_graph.values()):
            owners[key] = owners.get(key, 0) + 1
    places: dict[str, Place] = {}
    files: dict[str, bytes | Path] = {}
    weights: dict[str, tuple[str, ...]] = {}
    with (folder / WEIGHTS_FILE).open("wb") as stream:
        for name, model in models.items():
            everything = external or weight_bytes(model) > LARGEST_INLINE
            outside: dict[str, Place] = {}
            for tensor in large_tensors(model):
                key = keys[name][tensor.name]
                if everything or owners[key] > 1 or is_mapped(tensor):
                    if key not in places:
                        places[key] = (WEIGHTS_FILE, *_written(tensor, stream))
                    outside[tensor.name] = places[key]
            files[f"{name}.onnx"] = pointing(model, outside).SerializeToString()
            weights[name] = (WEIGHTS_FILE,) if outside else ()
    if places:
        files[WEIGHTS_FILE] = folder / WEIGHTS_FILE
    return files, weights


def for_session(model: onnx.ModelProto, folder: Path) -> bytes | Path:
    """What to make a session of the graph from: the message, or, if that is large, a file in `folder` whose weights onnxruntime
    maps. Of a message it keeps a copy beside its own form of the weights. The file may go once the session is there."""
    if not is_large(model) and not any(map(is_mapped, model.graph.initializer)):
        return model.SerializeToString()
    folder.mkdir(exist_ok=True)
    outline = moved_out(model, folder / WEIGHTS_FILE)
    names: dict[str, str] = {str(folder.absolute() / WEIGHTS_FILE): WEIGHTS_FILE}
    places: dict[str, Place] = {}
    for tensor in large_tensors(outline):
        file, offset, length = place_of(tensor)
        if file not in names:  # onnxruntime reads nothing from other folders, and follows no symbolic links
            names[file] = f"{len(names)}.data"
            _link(Path(file), folder / names[file])
        places[tensor.name] = (names[file], offset, length)
    path = folder / "graph.onnx"
    path.write_bytes(pointing(outline, places).SerializeToString())
    return path


def open_model(model: onnx.ModelProto, signature: GraphSignature, *, optimization: str = "all") -> Session:
    """A session of the graph on the CPU."""
    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
        return Session(for_session(model, Path(folder)), signature, device="cpu", optimization=optimization, log_level=4)


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where that cannot be, as on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _written(tensor: TensorProto, stream: IO[bytes]) -> tuple[int, int]:
    """Where in the file it was written, and how many bytes."""
    stream.write(b"\0" * (-stream.tell() % _ALIGNMENT))
    place = stream.tell(), bytes_of(tensor)
    stream.write(data_of(tensor))
    return place


def _key(tensor: TensorProto) -> str:
    """Equal for tensors of equal type and bytes; their shapes are kept in the graphs."""
    return f"{tensor.data_type}:{hashlib.sha256(data_of(tensor)).hexdigest()}"
