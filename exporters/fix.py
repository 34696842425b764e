"""Fixed sizes in place of dynamic axes, for accelerators that need them: `edgekit export … --fix batch=1 --fix time=16`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from runtime.bundle import ALIGNMENT
from runtime.errors import OptionError, UnknownName

from .exportable import Exportable, GraphSource

_GROWING = "past"


def fix_sizes(network: Exportable, sizes: Mapping[str, int]) -> Exportable:
    """`network` with every axis that `sizes` names at that size."""
    known = {label for graph in network.graphs for axes in graph.dynamic_axes.values() for label in axes.values()}
    for label, size in sizes.items():
        if label not in known:
            raise UnknownName.of("dynamic axis", label, sorted(known))
        if size < 1:
            raise OptionError(f"--fix {label}={size} is not a size; expected 1 or more")
    if _GROWING in sizes:
        raise OptionError(
            "--fix past: a cache that grows with every token has no fixed size; "
            "use --profile onnxruntime, whose cache is allocated once, and --fix capacity"
        )
    if sizes.get("batch", 1) > 1 and sizes.get("time", 1) > 1 and "capacity" in known:
        raise OptionError(
            f"--fix batch={sizes['batch']} with --fix time={sizes['time']}: onnxruntime's kernel continues several rows by one "
            "token only; fix time=1, or use --profile portable"
        )
    if "time" in sizes and any(graph.name == ALIGNMENT and _has_axis(graph, "time") for graph in network.graphs):
        raise OptionError(
            f"--fix time={sizes['time']} with --attention: the attention to the source is computed for a whole text at once; "
            "leave out one of them"
        )
    if "time" in sizes and "kept" in known:  # as many logits as tokens, unless fewer were asked for
        sizes = {"kept": sizes["time"], **sizes}
    return replace(network, graphs=tuple(_fixed(graph, sizes) for graph in network.graphs))


def _has_axis(graph: GraphSource, label: str) -> bool:
    return any(label in axes.values() for axes in graph.dynamic_axes.values())


def _fixed(graph: GraphSource, sizes: Mapping[str, int]) -> GraphSource:
    axes = {
        name: {axis: label for axis, label in entry.items() if label not in sizes} for name, entry in graph.dynamic_axes.items()
    }
    if graph.draw is None:
        inputs = {
            name: _resized(
                tensor, {axis: sizes[label] for axis, label in graph.dynamic_axes.get(name, {}).items() if label in sizes}
            )
            for name, tensor in graph.inputs.items()
        }
        return replace(graph, inputs=inputs, dynamic_axes=axes)
    original = graph.draw
    labels = {label for entry in graph.dynamic_axes.values() for label in entry.values()}

    def draw(wanted: Mapping[str, int], seed: int) -> dict[str, Tensor]:
        fixed = {**wanted, **sizes}
        if "capacity" in sizes and "capacity" in labels:  # which is drawn as room beyond the new tokens
            fixed["capacity"] = sizes["capacity"] - fixed["time"]
            if fixed["capacity"] < 0:
                raise OptionError(f"a cache of {sizes['capacity']} has no room for {fixed['time']} tokens")
        return original(fixed, seed)

    example = {
        label: int(graph.inputs[name].shape[axis])
        for name, entry in graph.dynamic_axes.items()
        for axis, label in entry.items()
    }
    return replace(graph, inputs=draw(example, 0), dynamic_axes=axes, draw=draw)


def _resized(tensor: Tensor, sizes: Mapping[int, int]) -> Tensor:
    for axis, size in sizes.items():
        tensor = tensor.index_select(axis, torch.arange(size) % tensor.shape[axis])
    return tensor.contiguous()
