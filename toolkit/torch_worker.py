"""The benchmark's worker for PyTorch: `python -m toolkit.torch_worker bench-worker`; runtime/bench_worker.py has the protocol.

A catalogue network is built with fresh weights: latency does not depend on their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from architectures.catalog import find
from architectures.raw_input import Preprocessing, build_network
from exporters.source import find_source
from runtime.errors import FeedError


class TorchTarget:
    device = "cpu"
    inputs = "as the bundles'"

    def __init__(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(request["threads"])
        self._by_keyword = False
        if "source" in request:
            graph = find_source(request["source"]).graph
            self._module, self._by_keyword = graph.module, graph.by_keyword
            self._inputs, self._axes = graph.inputs, graph.dynamic_axes
        else:
            architecture, about = find(request["architecture"]), request["preprocessing"]
            config = architecture.configure(request["config"])
            module, (spec,) = build_network(architecture, config, about and Preprocessing.from_json(about))
            self._module = module.eval()
            self._inputs = {spec.name: torch.randn([dim if isinstance(dim, int) else 1 for dim in spec.shape])}
            self._axes = {spec.name: {0: "batch"}}

    def prepare(self, batch: int | None) -> Callable[[], object]:
        feeds = {name: _resized(tensor, self._axes.get(name, {}), batch) for name, tensor in self._inputs.items()}

        def call() -> object:
            with torch.inference_mode():
                return self._module(**feeds) if self._by_keyword else self._module(*feeds.values())

        return call


def _resized(tensor: Tensor, axes: Mapping[int, str], batch: int | None) -> Tensor:
    """`tensor` repeated or cut to `batch` along its batch axis; without one it must have that size already."""
    axis = next((axis for axis, name in axes.items() if name == "batch"), None)
    if axis is not None:
        rows = torch.arange(batch or 1) % tensor.shape[axis]
        return tensor.index_select(axis, rows)
    if not axes and batch is not None and tensor.ndim and tensor.shape[0] != batch:
        raise FeedError(f"this network has a fixed batch of {tensor.shape[0]}; batch {batch} cannot be run")
    return tensor


if __name__ == "__main__":
    from runtime.bench_worker import serve

    serve(TorchTarget)
