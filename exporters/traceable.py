"""What can be said of a user's network before it is traced: kinds of modules, examples and habits that no graph can hold."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.errors import SourceError

from .explain import SourceLine
from .exportable import GraphSource
from .nesting import flatten


def refuse_untraceable_module(reference: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise SourceError(
            f"{reference} returned a TorchScript module, which has lost the code it was made from; "
            "return the nn.Module that was given to torch.jit.script or torch.jit.trace"
        )
    for name, part in module.named_modules():
        if "nn.quantized" in type(part).__module__ or "nn.intrinsic.quantized" in type(part).__module__:
            raise SourceError(
                f"{reference} returned a network that is quantized already ({name or 'itself'} is a quantized "
                f"{type(part).__name__}); return the float network, and quantize the bundle with: edgekit quantize"
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type != "cpu":
            raise SourceError(
                f"{reference} returned a network on device {tensor.device} ({name}); export runs on the CPU: load the weights "
                "there, with module.cpu() or map_location='cpu'"
            )


def refuse_untraceable_example(reference: str, name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise SourceError(
            f"example input {name!r} of {reference} is on device {tensor.device}; give it on the CPU, with .cpu()"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise SourceError(
            f"example input {name!r} of {reference} is {kind}; graphs take dense tensors: give it with .to_dense()"
        )
    if tensor.numel() == 0 or tensor.dtype == torch.bfloat16 or tensor.is_complex():
        what = "no elements" if tensor.numel() == 0 else f"dtype {tensor.dtype}"
        raise SourceError(
            f"example input {name!r} of {reference} has {what}; give real values of an ordinary type such as float32"
        )


def example_hint(module: nn.Module, named: Mapping[str, Any], error: BaseException) -> str:
    """What to do about an example of another type than the weights, the commonest cause of a network failing on its own."""
    weights = next((tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()), None)
    if weights is None or not any(word in str(error) for word in ("dtype", "type", "Double", "Half")):
        return ""
    for name, value in named.items():
        for path, leaf in flatten(name, value).items():
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != weights:
                return f"; example {path!r} is {leaf.dtype} and the weights are {weights}: give it as .to({weights})"
    return ""


def refuse_memory(reference: str, graph: GraphSource) -> None:
    """Refuse a network whose answer depends on what it was called with before: a graph remembers nothing."""
    before = _state(graph.module)
    first = graph.call({name: tensor.clone() for name, tensor in graph.inputs.items()})
    changed = [name for name, value in _state(graph.module).items() if before.get(name) != value]
    if not changed:
        return
    second = graph.call({name: tensor.clone() for name, tensor in graph.inputs.items()})
    if all(tensor.shape == second[name].shape and torch.equal(tensor, second[name]) for name, tensor in first.items()):
        return  # it only leaves something behind to be looked at, such as attention weights
    owner, _, attribute = changed[0].rpartition(".")
    line = _assignment(graph.module.get_submodule(owner), attribute)
    raise SourceError(
        f"the network of {reference} changes self.{attribute} in forward{f' {line}' if line else ''} and answers differently "
        "the next time, and a graph remembers nothing; take it as an input and return its new value as an output"
    )


def _state(module: nn.Module) -> dict[str, Any]:
    """Buffers and attributes of every part, as values that compare unequal after a change."""
    state: dict[str, Any] = {}
    for prefix, part in module.named_modules():
        values = {**part.__dict__, **part._buffers, **part._parameters}
        for name, value in values.items():
            if name.startswith("_") and name not in part._buffers:
                continue
            mark = (id(value), value._version) if isinstance(value, Tensor) and not value.is_inference() else _mark(value)
            state[f"{prefix}.{name}"] = mark
    return state


def _mark(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else id(value)


def _assignment(module: nn.Module, attribute: str) -> SourceLine | None:
    """The line of a module's code that assigns self.attribute outside of __init__."""
    try:
        lines, first = inspect.getsourcelines(type(module))
        file = inspect.getsourcefile(type(module))
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # made in a shell, or by a library without source
        return None
    for method in (item for item in ast.walk(tree) if isinstance(item, ast.FunctionDef) and item.name != "__init__"):
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.value, ast.Name):
                number = first + node.lineno - 1
                return SourceLine(str(Path(file or "")), number, lines[node.lineno - 1].strip())
    return None
