"""What export works on: a network as one or more graphs, each with example inputs, names and the axes that may vary."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime.errors import SourceError
from runtime.signature import StateSpec
from runtime.text import Tokenizer

MODEL = "model"  # the name of a network's only graph


@dataclass(frozen=True)
class GraphSource:
    """One graph to trace: tensors in, tensors out."""

    module: nn.Module
    inputs: Mapping[str, Tensor]  # one example of each, in the order `module` takes them
    dynamic_axes: Mapping[str, Mapping[int, str]]  # input → axis → name
    output_names: tuple[str, ...]
    name: str = MODEL
    by_keyword: bool = False  # call the module with names rather than positions
    states: tuple[StateSpec, ...] = ()  # what a decoder carries from step to step
    # fresh inputs at given sizes, for a seed; without it they are made to look like the examples
    draw: Callable[[Mapping[str, int], int], dict[str, Tensor]] | None = None
    axes_were_found: bool = False  # by trying, not declared: one that cannot be traced is made fixed rather than refused

    def call(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the module in PyTorch; its outputs by name."""
        with torch.inference_mode(), contextlib.redirect_stdout(sys.stderr):  # what it prints must not get among our results
            result = self.module(**inputs) if self.by_keyword else self.module(*inputs.values())
        return dict(zip(self.output_names, (tensor for _, tensor in named_outputs(result)), strict=True))


@dataclass(frozen=True)
class Generator:
    """A generating network as its laws are stated: the logits of whole sequences, in plain PyTorch."""

    network: Any
    vocabulary: int
    pad: int
    source_vocabulary: int | None = None  # encoder–decoders
    longest: int | None = None  # positions there are

    def logits(self, tokens: Tensor, source: Tensor | None, network: Any = None) -> Tensor:
        """tokens (batch, time) [of source (batch, source)] → logits (batch, time, vocabulary)."""
        network = network or self.network
        with torch.inference_mode():
            if source is not None:
                result: Tensor = network(source, tokens)
            else:
                result, *_ = network(tokens, *network.initial_state(tokens.shape[0]))
        return result


@dataclass(frozen=True)
class Exportable:
    """A network with everything a bundle needs to know about it."""

    name: str
    task: str
    graphs: tuple[GraphSource, ...]
    labels: tuple[str, ...] | None = None
    preprocessing: Mapping[str, Any] | None = None
    tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    generator: Generator | None = None  # networks that generate text: their decoding laws are proved too
    profile: str = "portable"
    source: Mapping[str, Any] = field(default_factory=dict)  # where it came from, for the lineage
    notes: tuple[str, ...] = ()  # what was decided on the user's behalf, to be said

    @property
    def graph(self) -> GraphSource:
        """The only graph of a network that has one."""
        if len(self.graphs) != 1:
            names = ", ".join(graph.name for graph in self.graphs)
            raise SourceError(f"{self.name} has several graphs ({names}), and this works on networks of one")
        return self.graphs[0]


def named_outputs(result: Any) -> list[tuple[str, Tensor]]:
    """A module's result as named tensors: a tensor, or tensors in (nested) tuples, lists, dicts and dataclasses. None is
    left out."""
    named = [(path or "output", value) for path, value in output_leaves(result) if value is not None]
    for path, value in named:
        if not isinstance(value, Tensor):
            where = f"the network returned {kind_of(value)}" + (f" as {path!r}" if value is not result else "")
            number = isinstance(value, bool | int | float)
            fix = f"leave it out, or return torch.tensor({value!r})" if number else "return only tensors"
            raise SourceError(f"{where}; expected a tensor, or a tuple, list, dict or dataclass of tensors: {fix}")
    if not named:
        raise SourceError(f"the network returned {kind_of(result)} without any tensor; a graph must have an output")
    return named


def output_leaves(result: Any) -> list[tuple[str, Any]]:
    """Everything in a module's result that is not a container, by path: a field's name, a key, or output_0, output_1, …"""
    if isinstance(result, Mapping):  # before dataclasses: a result that is both knows best which fields it has
        items = [(str(key), value) for key, value in result.items()]
    elif is_dataclass(result) and not isinstance(result, type):
        items = [(item.name, getattr(result, item.name)) for item in fields(result)]
    elif isinstance(result, Sequence) and not isinstance(result, str | bytes):
        names = getattr(result, "_fields", None) or [f"output_{index}" for index in range(len(result))]
        items = list(zip(names, result, strict=True))
    else:
        return [("", result)]
    return [(f"{name}.{path}" if path else name, leaf) for name, value in items for path, leaf in output_leaves(value)]


def kind_of(value: Any) -> str:
    return f"a {type(value).__name__}"
