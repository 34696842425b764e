"""The values of a weight, wherever they are: inside its message, or in a file that is mapped.

A message has at most 2 GiB, and a copy of it copies its weights. So the large weights of large graphs stay in files, and their
tensors point there by absolute paths: in memory only, no bundle has such a path. Who wants values asks here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Place = tuple[str, int, int]  # a file, the first byte in it, and how many
_SMALL = 1024  # bytes; a tensor below that costs more to point to than to repeat


def array_of(tensor: TensorProto) -> NDArray[Any]:
    """The values; of a mapped tensor a view of the file, which is read as far as it is looked at."""
    if not is_mapped(tensor):
        return numpy_helper.to_array(tensor)
    where = _external(tensor)
    shape = tuple(tensor.dims)
    return np.memmap(where["location"], _dtype(tensor), "r", offset=int(where["offset"]), shape=shape)


def bytes_of(tensor: TensorProto) -> int:
    return int(_external(tensor)["length"]) if is_mapped(tensor) else len(tensor.raw_data) or tensor.ByteSize()


def data_of(tensor: TensorProto) -> Any:
    """The bytes of a large tensor, as what files and digests take."""
    return np.ascontiguousarray(array_of(tensor)).reshape(-1).view(np.uint8).data if is_mapped(tensor) else tensor.raw_data


def is_mapped(tensor: TensorProto) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL and os.path.isabs(_external(tensor).get("location", ""))


def is_elsewhere(tensor: TensorProto) -> bool:
    """Whether its values cannot be had: they are in a file that was not read."""
    return tensor.data_location == TensorProto.EXTERNAL and not is_mapped(tensor)


def place_of(tensor: TensorProto) -> Place:
    """Where a mapped tensor is."""
    where = _external(tensor)
    return where["location"], int(where["offset"]), int(where["length"])


def large_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """The weights of the main graph that are worth a place of their own."""
    return (tensor for tensor in model.graph.initializer if is_mapped(tensor) or len(tensor.raw_data) >= _SMALL)


def pointing(model: onnx.ModelProto, places: Mapping[str, Place]) -> onnx.ModelProto:
    """A copy of the model in which the tensors that are named are at these places. What they held inside is not copied."""
    outline = onnx.ModelProto()
    _copy_fields(model, outline, "graph")
    _copy_fields(model.graph, outline.graph, "initializer")
    for tensor in model.graph.initializer:
        if tensor.name in places:
            copied = outline.graph.initializer.add()
            _copy_fields(tensor, copied, "raw_data")
            _point_to(copied, places[tensor.name])
        else:
            outline.graph.initializer.append(tensor)
    return outline


def _copy_fields(source: Message, target: Message, without: str) -> None:
    for field, value in source.ListFields():
        if field.name == without:
            continue
        if field.is_repeated or field.message_type is not None:
            getattr(target, field.name).MergeFrom(value)
        else:
            setattr(target, field.name, value)


def _point_to(tensor: TensorProto, place: Place) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in zip(("location", "offset", "length"), place, strict=True):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)


def map_in_place(model: onnx.ModelProto, folder: Path) -> None:
    """Of a model that was read without the weights in files of `folder`: its large ones are mapped from there."""
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        where = _external(tensor)
        length, size = int(where.get("length", 0)), prod(tensor.dims) * _dtype(tensor).itemsize
        if length == size >= _SMALL:  # types of less than a byte are packed
            _point_to(tensor, (str(folder.absolute() / where["location"]), int(where.get("offset", 0)), length))


def _external(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _dtype(tensor: TensorProto) -> np.dtype[Any]:
    return np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
