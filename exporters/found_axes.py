"""Exporting with axes that were found by trying: one that works in PyTorch but not in the graph is made fixed, and said so.

An axis the user declared is a wish, and not to fulfil it is an error. One that was found is an offer: a smaller one is better
than none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from runtime.errors import EdgekitError, ParityRefused, SourceError

from .dynamic_axes import BATCH
from .explain import FrozenAxis, concerns_sizes, frozen_axes
from .exportable import GraphSource

Proof = TypeVar("Proof")


def prove_found_axes(graph: GraphSource, prove: Callable[[GraphSource], Proof], note: Callable[[str], None]) -> Proof:
    """`prove(graph)`, if need be with fewer of the axes that were found."""
    notes: list[str] = []  # said only if it helped: otherwise the error is the whole story
    while True:
        try:
            proof = prove(graph)
        except (SourceError, ParityRefused) as error:
            faulty, why = _at_fault(graph, error)
            if not graph.axes_were_found or not faulty:
                raise
        else:
            for text in notes:
                note(text)
            return proof
        places = (f"{name} ({', '.join(_places(graph, name))})" for name in faulty)
        notes.append(f"fixed at the example's size: {', '.join(places)}; PyTorch runs at other sizes, but {why}")
        graph = _without(graph, faulty)


def _at_fault(graph: GraphSource, error: EdgekitError) -> tuple[list[str], str]:
    """The names of the axes to give up, and why."""
    names = list(dict.fromkeys(name for entry in graph.dynamic_axes.values() for name in entry.values()))
    if isinstance(error, ParityRefused):
        if error.frozen_axis is not None:
            return [error.frozen_axis], "the traced graph does not"
        return _disagreeing(graph, names, error), f"the graph does not: {str(error).partition('output ')[2][:200]}"
    reason = str(error).partition("cannot be traced: ")[2].partition("; ")[0]
    if frozen := _names_of(graph, frozen_axes(error)):
        return frozen, reason
    if error.__cause__ is None or not concerns_sizes(error.__cause__):
        return [], ""
    # The tracer gives no name. Keep the batch, which matters most; then nothing.
    return [name for name in names if name != BATCH] or names, reason[:300]


def _disagreeing(graph: GraphSource, names: list[str], error: ParityRefused) -> list[str]:
    """The axes that fail when they alone differ from the example; if none does, all that differ in a failing case."""
    sizes = {name: _example_size(graph, name) for name in names}
    changed = [[name for name in names if case.get(name) != sizes[name]] for case in error.failed_sizes]
    alone = [axes for axes in changed if len(axes) == 1]
    return list(dict.fromkeys(name for axes in alone or changed for name in axes))


def _example_size(graph: GraphSource, name: str) -> int:
    """What the tracer sees: at least two, see trace.examples_of."""
    sizes = [
        graph.inputs[key].shape[axis] for key, entry in graph.dynamic_axes.items() for axis in entry if entry[axis] == name
    ]
    return max(2, sizes[0])


def _places(graph: GraphSource, name: str) -> list[str]:
    return [f"{key}[{axis}]" for key, entry in graph.dynamic_axes.items() for axis in entry if entry[axis] == name]


def _names_of(graph: GraphSource, frozen: Iterable[FrozenAxis]) -> list[str]:
    inputs = list(graph.inputs)
    places = ((item.parameter if item.position is None else inputs[item.position], item.axis) for item in frozen)
    names = (graph.dynamic_axes.get(name, {}).get(axis) for name, axis in places)
    return list(dict.fromkeys(name for name in names if name is not None))


def _without(graph: GraphSource, names: list[str]) -> GraphSource:
    kept = {key: {axis: name for axis, name in entry.items() if name not in names} for key, entry in graph.dynamic_axes.items()}
    return replace(graph, dynamic_axes={key: entry for key, entry in kept.items() if entry})
