"""Why a network could not be traced, in one line: what its code does, where, and what to write instead.

The tracer's own report is pages of its internals. The line of the user's code is in it somewhere: in a frame of one of the
chained exceptions, in the text ("User Stack"), or on the graph node that was being translated.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from .exportable import GraphSource
from .nesting import Flat

_HERE = str(Path(__file__).resolve().parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_STANDARD_LIBRARY = str(Path(sysconfig.get_path("stdlib")).resolve())
_IN_TEXT = re.compile(r'File "([^"]+)", line (\d+)')
_FROZEN = re.compile(r"inferred a static shape of (\d+) for dimension inputs\['(\w+)'\](?:\[(\d+)\])?\.shape\[(\d+)\]")
_NO_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_DATA_DEPENDENT = ("data-dependent", "Data-dependent", "data dependent", "DataDependentOutputException")
_NUMPY = ".numpy() is not supported"


@dataclass(frozen=True)
class SourceLine:
    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"at {Path(self.file).name}:{self.number}" + (f" `{self.text[:100]}`" if self.text else "")


@dataclass(frozen=True)
class FrozenAxis:
    """An axis that was to vary and that the tracer found to be one number."""

    parameter: str  # of forward
    position: int | None  # within a *parameter
    axis: int
    size: int


def explain(error: BaseException, graph: GraphSource | None = None) -> str:
    """One line about a failure of the tracer or the translator; `graph`, if known, helps to find the line to blame."""
    texts = [f"{type(item).__name__}: {item}" for item in _chain(error)]
    line = source_line(error)
    where = f" {line}" if line else ""
    if match := _first(_NO_OPERATOR, texts):
        return (
            f"its forward uses {match[1].replace('.', '::')}{where}, which has no ONNX operator; "
            "compute it before the network, or write it with operations that ONNX has"
        )
    if any(word in text for text in texts for word in _DATA_DEPENDENT):
        what, instead = _data_dependence(line.text if line else "")
        return f"its forward {what}{where}, and a graph has no such step; {instead}"
    if any(_NUMPY in text for text in texts):
        return f"its forward leaves PyTorch for numpy{where}, where a graph cannot follow; write that with torch functions"
    if frozen := frozen_axes(error):
        named = ", ".join(f"axis {item.axis} of {_argument(item, graph)!r} is always {item.size}" for item in frozen)
        line = freezing_line(graph) if graph else None
        where = f" {line}" if line else ""
        return (
            f"its forward was traced for one size only{where}: {named}; a Python loop over that size, int() of it, or a number "
            "written into view or reshape does that: use -1 or tensor operations there, or leave the axis out of dynamic_axes"
        )
    return f"{reason_of(error)}{where}"


def concerns_sizes(error: BaseException) -> bool:
    """Whether the failure may come from sizes that vary: those with causes of their own do not."""
    texts = [f"{type(item).__name__}: {item}" for item in _chain(error)]
    other = (*_DATA_DEPENDENT, _NUMPY, "No ONNX function found")
    return not any(word in text for text in texts for word in other)


def _data_dependence(text: str) -> tuple[str, str]:
    """What a line of source does with a tensor's values, and what to do instead."""
    if re.match(r"(for|while)\b", text):
        return "loops as often as values of a tensor say", "loop over a fixed number or a size, and mask with torch.where"
    if re.search(r"\.item\(|\.tolist\(|\bint\(|\bfloat\(|\brange\(", text) and not re.search(r"\bif\b|\bassert\b", text):
        return "makes Python numbers of a tensor's values", "keep them in tensors, or take sizes from .shape"
    return "branches on values of a tensor", "use torch.where instead of if"


def frozen_axes(error: BaseException) -> list[FrozenAxis]:
    """The axes that the tracer says have one size only."""
    found = []
    for text in (str(item) for item in _chain(error)):
        for size, parameter, position, axis in _FROZEN.findall(text):
            found.append(FrozenAxis(parameter, int(position) if position else None, int(axis), int(size)))
    return list(dict.fromkeys(found))


def freezing_line(graph: GraphSource) -> SourceLine | None:
    """The line that makes a number of a size, found by tracing again with leave to do so: the tracer then says where it did."""
    automatic = tuple(dict.fromkeys(graph.dynamic_axes.get(name, {}), torch.export.Dim.AUTO) for name in graph.inputs)
    try:
        program = torch.export.export(
            Flat(graph.module, graph.inputs, graph.by_keyword), tuple(graph.inputs.values()), dynamic_shapes=(automatic,)
        )
        values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
        modes = (value.fake_mode for value in values if hasattr(value, "fake_mode"))
        # Of a loop or int() the frame is the user's; of a reshape it is torch's own, and there is no telling whose.
        frames = [location.framework_loc for location in next(modes).shape_env.replacements_slocs.values()]
        frame = next(frame for frame in frames if not _is_machinery(frame.filename))
    except Exception:  # a convenience built on the tracer's insides: without it the message lacks a line, no more
        return None
    return SourceLine(frame.filename, frame.lineno, linecache.getline(frame.filename, frame.lineno).strip())


def source_line(error: BaseException) -> SourceLine | None:
    """The user's line that an error is about; a line of some library's model if there is none of the user's own."""
    places = [place for item in reversed(list(_chain(error))) for place in _places(item)]
    own = [place for place in places if "site-packages" not in place[0]]
    for file, number in (*reversed(own), *reversed(places)):
        if Path(file).is_file():
            return SourceLine(file, number, linecache.getline(file, number).strip())
    return None


def one_line(error: BaseException) -> str:
    """An error of the user's own code, and where in it."""
    line = source_line(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}" + (f" {line}" if line else "")


def reason_of(error: BaseException) -> str:
    """The line of an exporter's report that tells the cause."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    return f"{type(root).__name__}: {(lines[0] if lines else '')[:300]}"


def _places(error: BaseException) -> Iterator[tuple[str, int]]:
    """File and line of everything an error points at, outside of torch and of this package; the likeliest last."""
    found = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    found += [(file, int(number)) for file, number in _IN_TEXT.findall(str(error))]
    found += [(file, int(number)) for text in _node_stacks(error.__traceback__) for file, number in _IN_TEXT.findall(text)]
    return ((file, number) for file, number in found if not _is_machinery(file))


def _is_machinery(file: str) -> bool:
    path = str(Path(file).resolve())
    standard = path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path
    return standard or path.startswith((_HERE, _TORCH)) or file.startswith("<")


def _node_stacks(trace: TracebackType | None) -> Iterator[str]:
    """The translator names the graph node it failed on; where that came from in the source only the node itself knows."""
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            if isinstance(value, torch.fx.Node) and value.stack_trace:
                yield value.stack_trace
        trace = trace.tb_next


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    item: BaseException | None = error
    while item is not None and id(item) not in seen:
        seen.add(id(item))
        yield item
        item = item.__cause__ or (None if item.__suppress_context__ else item.__context__)


def _first(pattern: re.Pattern[str], texts: list[str]) -> re.Match[str] | None:
    return next((match for text in texts if (match := pattern.search(text))), None)


def _argument(item: FrozenAxis, graph: GraphSource | None) -> str:
    if item.position is None:
        return item.parameter
    return f"{item.parameter}[{item.position}]" if graph is None else list(graph.inputs)[item.position]
