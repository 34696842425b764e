"""Where weights are kept: inside their graph, or in one file beside all graphs of a bundle.

Tensors that several graphs share (an embedding, a table of positions) are always kept in that file, once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
from onnx import TensorProto

from .graph import copy_of

WEIGHTS_FILE = "weights.data"
_SMALL = 1024  # bytes; a tensor below that costs more to point to than to repeat
LARGE = 512 << 20  # bytes of a graph, several of which would be too much to keep in memory
_ALIGNMENT = 4096  # of a tensor in the file: one page, so that it can be mapped


def pack_graphs(
    models: Mapping[str, onnx.ModelProto], *, folder: Path | None = None, external: bool = False, once: bool = False
) -> tuple[dict[str, bytes | Path], dict[str, tuple[str, ...]]]:
    """Files of the graphs, `NAME.onnx` and perhaps WEIGHTS_FILE, and for each graph the weight files it reads.

    With `external` every large tensor goes to the weights file, not only those that are shared; with `once` those too that one
    graph holds twice, perhaps in different shapes. A graph whose weights are already in a file in `folder` (see trace.py) keeps
    it.
    """
    separate = {name: file for name, model in models.items() if (file := _file_of(model))}
    keys = {name: {tensor.name: _key(tensor) for tensor in large_tensors(model)} for name, model in models.items()}
    owners: dict[str, int] = {}
    for of_graph in keys.values():
        for key in of_graph.values() if once else set(of_graph.values()):
            owners[key] = owners.get(key, 0) + 1
    outside = {key for key, count in owners.items() if external or count > 1}
    places: dict[str, tuple[int, int]] = {}
    data = bytearray()
    files: dict[str, bytes | Path] = {}
    weights: dict[str, tuple[str, ...]] = {}
    for name, model in models.items():
        mine = {tensor: key for tensor, key in keys[name].items() if key in outside}
        if mine:
            model = copy_of(model)
            for tensor in large_tensors(model):
                if tensor.name not in mine:
                    continue
                key = mine[tensor.name]
                if key not in places:
                    data.extend(b"\0" * (-len(data) % _ALIGNMENT))
                    places[key] = (len(data), len(tensor.raw_data))
                    data.extend(tensor.raw_data)
                _point_to(tensor, *places[key])
        files[f"{name}.onnx"] = model.SerializeToString()
        weights[name] = (*((WEIGHTS_FILE,) if mine else ()), *((separate[name],) if name in separate else ()))
        if name in separate:
            assert folder is not None
            files[separate[name]] = folder / separate[name]
    if data:
        files[WEIGHTS_FILE] = bytes(data)
    return files, weights


def for_session(model: onnx.ModelProto, folder: Path) -> bytes | Path:
    """What to make a session of the graph from: the message, or, if that is large, a file in `folder` whose weights onnxruntime
    maps. Of a message it keeps a copy beside its own form of the weights. The file may go once the session is there."""
    if model.ByteSize() < LARGE:
        return model.SerializeToString()
    outline = copy_of(model)
    folder.mkdir(exist_ok=True)
    with (folder / WEIGHTS_FILE).open("wb") as stream:
        for tensor in large_tensors(outline):
            stream.write(b"\0" * (-stream.tell() % _ALIGNMENT))
            place = stream.tell(), len(tensor.raw_data)
            stream.write(tensor.raw_data)
            _point_to(tensor, *place)
    path = folder / "graph.onnx"
    path.write_bytes(outline.SerializeToString())
    return path


def large_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """The weights of the main graph that are worth a place of their own."""
    return (tensor for tensor in model.graph.initializer if len(tensor.raw_data) >= _SMALL)


def _file_of(model: onnx.ModelProto) -> str | None:
    """The file beside the model that its weights are in, if they are in one."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                return str(entry.value)
    return None


def _key(tensor: TensorProto) -> str:
    """Equal for tensors of equal type and bytes; their shapes are kept in the graphs."""
    return f"{tensor.data_type}:{hashlib.sha256(tensor.raw_data).hexdigest()}"


def _point_to(tensor: TensorProto, offset: int, length: int) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", WEIGHTS_FILE), ("offset", str(offset)), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
