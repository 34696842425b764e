"""Every intermediate value of one run, three times: in onnxruntime, in the traced program, and in live PyTorch.

The exporter names ONNX values after the nodes of the program torch.export traced, so those two are compared by name. Live
PyTorch has no names; what ties it to the program is the source line that was executing.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch.export.graph_signature import InputKind, OutputKind
from torch.overrides import TorchFunctionMode

from .exportable import GraphSource

Arrays = dict[str, NDArray[Any]]
Frame = tuple[str, int, str]  # file, line, function
Stack = tuple[Frame, ...]  # outermost first
_REASON = re.compile(r"Status Message: (?:.* was false\.? )?(.*)")  # what onnxruntime says after the place in its own source
TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (.+)')


@dataclass(frozen=True)
class Run:
    """The values by name; and if the run broke off, where and why."""

    values: Arrays
    failed: str | None = None  # the first value that could not be made
    problem: str = ""


def run_onnx(model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]]) -> Run:
    """Run with every value as an output; if that fails, as far as the graph goes."""
    values, problem = _run_first(model, len(model.graph.node), feeds)
    if values is not None:
        return Run(values)
    good, bad = 0, len(model.graph.node)  # the first `good` nodes run, the first `bad` do not
    reached: Arrays = {}
    while bad - good > 1:
        middle = (good + bad) // 2
        values, reason = _run_first(model, middle, feeds)
        if values is None:
            bad, problem = middle, reason
        else:
            good, reached = middle, values
    return Run(reached, next(filter(None, model.graph.node[bad - 1].output)), problem)


def run_program(
    graph: GraphSource, program: torch.export.ExportedProgram, feeds: Mapping[str, NDArray[Any]], nudge: bool
) -> Run:
    """Interpret the traced program; with `nudge`, all weights and inputs are off by one rounding step."""
    recorder = _Recorder(program.graph_module)
    arguments = [_nudged(value) if nudge else value for value in _arguments(graph, program, feeds)]
    try:
        with torch.inference_mode():
            recorder.run(*arguments)
    except Exception as error:  # a baked shape breaks the program just as it breaks the graph made of it
        return Run(recorder.values, recorder.current, " ".join(str(error).split())[:300])
    return Run(recorder.values)


@dataclass(frozen=True)
class EagerRun:
    """What live PyTorch computed, by the source lines that led to it, in order; and how often it called each function there."""

    values: dict[Stack, list[NDArray[Any]]]
    calls: Counter[tuple[Stack, str]]


def run_eager(graph: GraphSource, feeds: Mapping[str, NDArray[Any]], known: set[Frame]) -> EagerRun:
    """Run the live module and note the result of every torch function. Only `known` lines are told apart."""
    spy = _Spy(known)
    with spy:
        graph.call({name: _tensor(graph, feeds, name) for name in graph.inputs})
    return EagerRun(spy.values, spy.calls)


def stack_of(trace: str | None) -> Stack:
    """The frames in a stack trace as torch writes them."""
    return tuple((file, int(line), name) for file, line, name in _FRAME.findall(trace or ""))


def output_nodes(graph: GraphSource, program: torch.export.ExportedProgram) -> dict[str, str]:
    """ONNX output → the program's node that gives it."""
    specs = [spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    return {name: str(getattr(spec.arg, "name", name)) for name, spec in zip(graph.output_names, specs, strict=False)}


def _run_first(model: onnx.ModelProto, count: int, feeds: Mapping[str, NDArray[Any]]) -> tuple[Arrays | None, str]:
    part = onnx.ModelProto()
    part.CopyFrom(model)
    del part.graph.node[count:]
    del part.graph.output[:]
    del part.graph.value_info[:]  # declared sizes may be what is wrong
    names = [name for node in part.graph.node for name in node.output if name]
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)  # onnxruntime infers the types
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # fused nodes would have no names
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(part.SerializeToString(), options, providers=["CPUExecutionProvider"])
        taken = {item.name for item in session.get_inputs()}
        values = session.run(names, {name: array for name, array in feeds.items() if name in taken})
    except Exception as error:  # onnxruntime raises its own C++ exceptions, all children of Exception
        message = " ".join(str(error).split())
        found = _REASON.search(message)
        return None, (found[1] if found else message)[:200]
    return {name: value for name, value in zip(names, values, strict=True) if isinstance(value, np.ndarray)}, ""


class _Recorder(torch.fx.Interpreter):
    """Notes every value. An ONNX operator that was put into the program as such has no meaning in PyTorch, which gives zeros
    for it; neither it nor what depends on it is noted."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.values: Arrays = {}
        self.meaningless: set[str] = set()
        self.current = ""

    def run_node(self, n: torch.fx.Node) -> Any:
        self.current = n.name
        value = super().run_node(n)
        is_symbolic = getattr(n.target, "namespace", "") == "onnx_symbolic"
        if is_symbolic or any(node.name in self.meaningless for node in n.all_input_nodes):
            self.meaningless.add(n.name)
        elif n.op == "call_function":
            for array in _arrays_in((value,)):  # none for a tuple, whose parts are nodes of their own
                self.values[n.name] = array
        return value


class _Spy(TorchFunctionMode):
    """Notes the result of every torch function that Python calls."""

    def __init__(self, known: set[Frame]) -> None:
        super().__init__()
        self.known = known
        self.values: dict[Stack, list[NDArray[Any]]] = {}
        self.calls: Counter[tuple[Stack, str]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor | tuple | list):
            stack = self._stack(sys._getframe(1))
            if stack:
                self.values.setdefault(stack, []).extend(_arrays_in((result,), nested=True))
                self.calls[stack, getattr(func, "__name__", str(func))] += 1
        return result

    def _stack(self, frame: FrameType | None) -> Stack:
        """The known lines that led to this call; none if it was made on another line of a function that has known ones.

        Torch notes lines of `forward` functions only, so that a helper's calls belong to the line that called the helper.
        """
        traced = {name for _, _, name in self.known}
        stack: list[Frame] = []
        while frame is not None:
            here = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            if here in self.known:
                stack.append(here)
            elif not stack and here[2] in traced and not here[0].startswith(TORCH):
                return ()
            frame = frame.f_back
        return tuple(reversed(stack))


def _arrays_in(values: Iterable[Any], nested: bool = False) -> list[NDArray[Any]]:
    arrays = []
    for value in values:
        if isinstance(value, torch.Tensor):
            plain = value.detach().float() if value.dtype == torch.bfloat16 else value.detach()  # numpy has no bfloat16
            arrays.append(np.array(plain.cpu().numpy()))
        elif isinstance(value, bool | int | float):
            arrays.append(np.asarray(value))
        elif nested and isinstance(value, tuple | list):
            arrays += _arrays_in(value, nested=True)
    return arrays


def _arguments(
    graph: GraphSource, program: torch.export.ExportedProgram, feeds: Mapping[str, NDArray[Any]]
) -> list[torch.Tensor | Any]:
    """What the program's placeholders take: weights and constants, which it lifts out of the module, and the inputs."""
    specs = program.graph_signature.input_specs
    inputs = iter(_tensor(graph, feeds, name) for name in graph.inputs)
    values: list[Any] = []
    for spec in specs:
        if spec.kind is InputKind.USER_INPUT:
            values.append(next(inputs))
        else:
            target = str(spec.target)
            values.append(program.state_dict[target] if target in program.state_dict else program.constants[target])
    return values


def _tensor(graph: GraphSource, feeds: Mapping[str, NDArray[Any]], name: str) -> torch.Tensor:
    """The input; one that vanished from the graph because nothing depends on it keeps its example."""
    return torch.from_numpy(np.array(feeds[name])) if name in feeds else graph.inputs[name]


def _nudged(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
    return value.detach() * (1 + torch.finfo(value.dtype).eps * signs).to(value.dtype)
