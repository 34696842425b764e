"""duplicated-weights: the same weights stored more than once, within a graph or in two graphs of a bundle.

Graphs that point into one external file share their weights on disk and in memory; copies inside each file do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import onnx

from ..finding import BundleRule, Finding, Graph
from ..graph import graphs_of, read_without_weights

_SMALL = 1024  # bytes: a shape, a scale or a bias that is not worth a word

Place = tuple[str, str, int]  # file, tensor (or the external file itself), offset


def run(graphs: Sequence[Graph]) -> Iterator[Finding]:
    first_seen: dict[tuple[object, ...], tuple[Graph, str, Place]] = {}
    copies: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for graph in graphs:
        if not graph.complete:
            continue
        places = _external_places(graph)
        for inner in graphs_of(graph.model):
            for tensor in inner.initializer:
                content = _bytes(tensor)
                if len(content) <= _SMALL:
                    continue
                place = places.get(tensor.name, (str(graph.path), tensor.name, 0))
                key = (hashlib.sha256(content).digest(), tensor.data_type, tuple(tensor.dims))
                other, _, known = first_seen.setdefault(key, (graph, tensor.name, place))
                if known != place:
                    copies.setdefault((graph.name, other.name), []).append((tensor.name, len(content)))
    for (name, other_name), tensors in copies.items():
        largest = max(tensors, key=lambda item: item[1])[0]
        count, total = len(tensors), sum(size for _, size in tensors)
        noun = "weight" if count == 1 else "weights"
        if name == other_name:
            reason, fix = f"{count} {noun} ({total:,} bytes) stored twice in this graph", "run: edgekit optimize"
        else:
            reason = f"{count} {noun} ({total:,} bytes) stored again, though graph {other_name!r} has them"
            fix = "keep the weights of both graphs in one external data file"
        yield Finding("duplicated-weights", "warning", largest, reason, fix, name if len(graphs) > 1 else "")


def _external_places(graph: Graph) -> dict[str, Place]:
    """Where the tensors are that the file only points to."""
    places = {}
    for inner in graphs_of(read_without_weights(graph.path)):
        for tensor in inner.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                entries = {entry.key: entry.value for entry in tensor.external_data}
                file = (graph.path.parent / entries.get("location", "")).resolve()
                places[tensor.name] = (str(file), "", int(entries.get("offset", 0)))
    return places


def _bytes(tensor: onnx.TensorProto) -> bytes:
    return tensor.raw_data or onnx.numpy_helper.to_array(tensor).tobytes()


RULE = BundleRule("duplicated-weights", "no weights are stored twice, in one graph or in two", run)
