"""Small helpers on ONNX models: reading them kindly, cleaning them, and telling their signature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime
from google.protobuf.message import DecodeError
from onnx import numpy_helper

from runtime.errors import SourceError
from runtime.onnx_file import external_files
from runtime.signature import DTYPES, Dim, GraphSignature, StateSpec, TensorSpec

from .tensors import array_of, bytes_of, is_elsewhere

_NO_NAMES = ("?", "-1", "None", "unk", "*")  # what exporters write for "some size": two of them need not be equal
_CURES = {
    "input": "give the graph tensors, and make the others from them outside it",
    "output": "leave it out of the graph's outputs, or export it as a tensor (a converter's ZipMap can be turned off)",
}


def read_model(path: str | Path) -> onnx.ModelProto:
    """Load an ONNX file with its external data, or say in one line what is wrong with it."""
    path = Path(path)
    model = read_without_weights(path)
    refuse_missing_weights(path)
    load_weights(model, path)
    return model


def refuse_missing_weights(path: Path) -> None:
    """Files beside the model that it reads must be there, and nowhere else."""
    if missing := [name for name in missing_external(path) if name]:
        raise SourceError(f"{path} needs the weights file {missing[0]!r} beside it, which is missing; copy it there")
    for location in external_files(path):
        if not (path.parent / location).resolve().is_relative_to(path.parent.resolve()):
            raise SourceError(f"{path} reads weights from {location!r}, outside its own folder; move the file beside it")


def load_weights(model: onnx.ModelProto, path: Path) -> None:
    """Into a model that was read from `path` without those in other files."""
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except Exception as error:
        raise SourceError(f"{path} has external weights that cannot be read ({_line(error)}); get the files again") from error


def read_without_weights(path: Path) -> onnx.ModelProto:
    """The model as it is in the file; tensors kept in other files stay pointers."""
    if not path.is_file():
        raise SourceError(f"there is no file {path}; expected an ONNX model")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise SourceError(f"{path} is not a readable ONNX model: it is truncated or garbage") from error
    if not model.graph.node and not model.graph.output:
        raise SourceError(f"{path} is not a readable ONNX model: it holds no graph")
    return model


def missing_external(path: Path) -> list[str]:
    return sorted(name for name in external_files(path) if not (path.parent / name).is_file())


def clean(model: onnx.ModelProto) -> onnx.ModelProto:
    """Drop what only a debugger reads (stack traces, stale shapes), then infer the shapes anew. Weights are untouched."""
    model = copy_of(model)
    del model.metadata_props[:]
    del model.graph.value_info[:]  # dynamo lists initializers there, which breaks quantizers, and stale example sizes
    for graph in graphs_of(model):
        del graph.metadata_props[:]
        graph.ClearField("doc_string")
        for number, node in enumerate(graph.node):
            if "symbolic_multi_out" in node.name:  # the tracer's name for an operator that we put there
                node.name = f"node_{node.op_type}_{number}"
        for item in (*graph.node, *graph.initializer, *graph.input, *graph.output):
            del item.metadata_props[:]
            item.ClearField("doc_string")
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception:  # contrib operators have no shape function; the graph is right all the same
        return model


def rename_outputs(model: onnx.ModelProto, prefix: str) -> onnx.ModelProto:
    """Outputs without `prefix`; a value inside the graph that has the same name gets another one."""
    wanted = {value.name: value.name.removeprefix(prefix) for value in model.graph.output}
    taken = set(wanted.values()) & _names_of(model)
    renamed = wanted | {name: f"{name} (inside)" for name in taken}
    for graph in graphs_of(model):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = renamed.get(value.name, value.name)
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [renamed.get(name, name) for name in names]
    return model


def _names_of(model: onnx.ModelProto) -> set[str]:
    weights = {tensor.name for graph in graphs_of(model) for tensor in graph.initializer}
    return weights | {name for graph in graphs_of(model) for node in graph.node for name in node.output}


def fold_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Compute what is made of weights alone (gates put into another order, biases joined), where the originals then go away.

    A weight that is also used as it is (an embedding that is its own output layer, transposed) stays one weight.
    """
    graph = model.graph
    known = {tensor.name: tensor for tensor in graph.initializer if not is_elsewhere(tensor)}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    made: dict[str, set[str]] = {}  # value → the weights it is made of
    folding: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type in _REARRANGING and all(not name or name in known or name in made for name in node.input):
            roots = set().union(*(made.get(name, {name}) for name in node.input if name))
            made |= dict.fromkeys(node.output, roots)
            folding.append(node)
    outside = {
        root
        for name, nodes in readers.items()
        for node in nodes
        for root in made.get(name, {name})
        if name in known and not any(node is folded for folded in folding)
    }
    for node in folding:
        sources = made[node.output[0]]
        if any(bytes_of(known[name]) > SMALL_WEIGHT and name in outside for name in sources):
            continue
        if not all(not name or name in known for name in node.input):  # what it reads was not folded
            continue
        values = onnx.reference.ReferenceEvaluator(_alone(node, model)).run(
            None, {name: array_of(known[name]) for name in node.input if name}
        )
        for name, value in zip(node.output, values, strict=True):
            known[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
            graph.initializer.append(known[name])
        graph.node.remove(node)
    drop_unread_weights(model)
    return model


_REARRANGING = {"Concat", "Slice", "Split", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Gather", "Identity"}
SMALL_WEIGHT = 4096  # bytes; to repeat one of these costs nothing


def _alone(node: onnx.NodeProto, model: onnx.ModelProto) -> onnx.ModelProto:
    """A model of this node only."""
    untyped = onnx.TypeProto()
    inputs = [onnx.helper.make_value_info(name, untyped) for name in node.input if name]
    outputs = [onnx.helper.make_value_info(name, untyped) for name in node.output]
    alone = onnx.helper.make_graph([node], "node", inputs, outputs)
    return onnx.helper.make_model(alone, opset_imports=model.opset_import, ir_version=model.ir_version)


def drop_unread_weights(model: onnx.ModelProto) -> None:
    read = {name for graph in graphs_of(model) for node in graph.node for name in node.input}
    read |= {value.name for value in model.graph.output}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def graphs_of(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The main graph and every graph inside an attribute (If, Loop, Scan)."""

    def walk(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                for inner in (attribute.g, *attribute.graphs):
                    if inner.node or inner.output:
                        yield from walk(inner)

    yield from walk(model.graph)


def signature_of(
    model: onnx.ModelProto, states: tuple[StateSpec, ...] = (), *, observed_outputs: bool = False
) -> GraphSignature:
    """What the graph declares. Unnamed dynamic axes get the name of their input and number.

    An output without a shape is refused, or with `observed_outputs` taken as a scalar until a run shows what it is.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    weights |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    inputs = tuple(_spec("input", value) for value in model.graph.input if value.name not in weights)
    outputs = tuple(_spec("output", value, observed_outputs) for value in model.graph.output)
    return GraphSignature(inputs, outputs, states)


def operators_of(model: onnx.ModelProto) -> Counter[str]:
    """How often each operator occurs; operators outside the standard set carry their domain."""
    return Counter(
        f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        for graph in graphs_of(model)
        for node in graph.node
    )


def opset_of(model: onnx.ModelProto) -> int:
    """Of the standard operators, where there are any."""
    return next((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), 1)


def requirements_of(*models: onnx.ModelProto) -> dict[str, Any]:
    """What a host needs to run all of these graphs."""
    return {
        "opsets": {item.domain or "ai.onnx": item.version for model in models for item in model.opset_import},
        "operators": sorted({name for model in models for name in operators_of(model)}),
        "onnxruntime": onnxruntime.__version__,  # the version it was proved with
        "cpu_features": [],
    }


def precision_of(*models: onnx.ModelProto) -> str:
    """What the weights are kept in: the narrowest type among them that is not plain float32."""
    kinds = {tensor.data_type for model in models for tensor in model.graph.initializer if tensor.dims}
    names = {
        onnx.TensorProto.INT8: "int8",
        onnx.TensorProto.UINT8: "int8",
        onnx.TensorProto.FLOAT16: "fp16",
        onnx.TensorProto.BFLOAT16: "bf16",
        onnx.TensorProto.DOUBLE: "fp64",
    }
    return next((names[kind] for kind in names if kind in kinds), "fp32")


def _spec(role: str, value: onnx.ValueInfoProto, any_shape: bool = False) -> TensorSpec:
    label = f"{role} {value.name!r}"
    holder = value.type.WhichOneof("value") or "untyped_type"
    if holder != "tensor_type":
        kind = holder.removesuffix("_type").replace("_", " ")
        raise SourceError(f"{label} is of the kind {kind!r}, and only tensors are supported; {_CURES[role]}")
    tensor = value.type.tensor_type
    known = tensor.elem_type in onnx.TensorProto.DataType.values()
    kind = onnx.TensorProto.DataType.Name(tensor.elem_type).lower() if known else f"type {tensor.elem_type}"
    dtype = {"float": "float32", "double": "float64"}.get(kind, kind)
    if dtype not in DTYPES:
        raise SourceError(f"{label} holds {dtype} values, which are not supported; supported are: {', '.join(DTYPES)}")
    if not tensor.HasField("shape"):
        if any_shape:
            return TensorSpec(value.name, dtype, ())
        raise SourceError(
            f"{label} declares no shape, so not even its number of axes is known; declare one, with names for axes that vary: "
            f"onnx.helper.make_tensor_value_info({value.name!r}, {tensor.elem_type}, ['batch', 3])"
        )
    shape: list[Dim] = []
    for axis, dim in enumerate(tensor.shape.dim):
        fixed = dim.HasField("dim_value") and dim.dim_value > 0  # old exporters wrote -1 or 0 for an axis that varies
        name = "" if dim.dim_param in _NO_NAMES else dim.dim_param
        shape.append(int(dim.dim_value) if fixed else (name or f"{value.name}_{axis}"))
    return TensorSpec(value.name, dtype, tuple(shape))


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
