"""Finds the external data files an ONNX model refers to, without the onnx package.

A device has numpy and onnxruntime only, yet it must refuse a graph whose weights point outside the bundle before
onnxruntime follows the pointer. ONNX is protobuf: nested records of (field number, wire type, payload), so walking the few
fields that can lead to a tensor is enough. Field numbers are those of onnx.proto, which never change.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from .errors import BundleError

# message → {field number: message inside it}; only the paths that lead to a tensor or its external_data
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
_LENGTH_DELIMITED = 2
_DEEPEST = 100  # graphs within graphs; real ones have a handful


def external_files(path: Path) -> set[str]:
    """The locations that tensors of the model at `path` name, relative to it. Raises BundleError if it is not ONNX."""
    with path.open("rb") as stream:
        if path.stat().st_size == 0:
            raise BundleError(f"{path.name} is empty, expected an ONNX model")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return set(_locations(data, 0, len(data), "model"))
            except (IndexError, UnicodeDecodeError) as error:
                raise BundleError(f"{path.name} is not a readable ONNX model: it is truncated or garbage") from error


def _locations(data: mmap.mmap, start: int, end: int, message: str, depth: int = 0) -> Iterator[str]:
    if depth > _DEEPEST:
        raise IndexError("nested too deeply")
    children = _CHILDREN[message]
    for field, wire, begin, stop in _fields(data, start, end):
        child = children.get(field)
        if child is None or wire != _LENGTH_DELIMITED:
            continue
        if child == "entry":
            key, value = _entry(data, begin, stop)
            if key == "location":
                yield value
        else:
            yield from _locations(data, begin, stop, child, depth + 1)


def _entry(data: mmap.mmap, start: int, end: int) -> tuple[str, str]:
    texts = {1: "", 2: ""}
    for field, wire, begin, stop in _fields(data, start, end):
        if wire == _LENGTH_DELIMITED:
            texts[field] = data[begin:stop].decode()
    return texts[1], texts[2]


def _fields(data: mmap.mmap, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, wire type, payload begin, payload end) of each record in data[position:end]."""
    while position < end:
        tag, position = _varint(data, position, end)
        field, wire = tag >> 3, tag & 7
        begin = position
        if wire == 0:
            _, position = _varint(data, position, end)
        elif wire == 1:
            position += 8
        elif wire == _LENGTH_DELIMITED:
            length, begin = _varint(data, position, end)
            position = begin + length
        elif wire == 5:
            position += 4
        else:
            raise IndexError(f"wire type {wire}")
        if position > end or field == 0:
            raise IndexError("record runs past its container")
        yield field, wire, begin, position


def _varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise IndexError("varint runs past its container")
