"""The benchmark's worker for PyTorch: `python -m toolkit.torch_worker bench-worker`. See runtime/bench.py for the protocol.

A catalogue network is built with fresh weights: latency does not depend on their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def open_network(request: dict[str, Any]) -> Callable[[int], Callable[[], object]]:
    import torch

    from exporters.source import find_source

    torch.set_num_threads(request["threads"])
    if "source" in request:
        network = find_source(request["source"])
        module, inputs, axes, by_keyword = network.module, network.inputs, network.dynamic_axes, network.by_keyword
    else:
        module, name, example = _catalogue_network(request)
        inputs, axes, by_keyword = {name: example}, {name: {0: "batch"}}, False

    def prepare(batch: int) -> Callable[[], object]:
        feeds = {name: _resized(tensor, axes.get(name, {}), batch) for name, tensor in inputs.items()}

        def call() -> object:
            with torch.inference_mode():
                return module(**feeds) if by_keyword else module(*feeds.values())

        return call

    return prepare


def _catalogue_network(request: dict[str, Any]) -> tuple[Any, str, Any]:
    import torch

    from architectures.catalog import find
    from architectures.raw_input import Preprocessing, build_network

    architecture = find(request["architecture"])
    about = request["preprocessing"]
    module, spec = build_network(
        architecture, architecture.configure(request["config"]), about and Preprocessing.from_json(about)
    )
    return module.eval(), spec.name, torch.randn([dim if isinstance(dim, int) else 1 for dim in spec.shape])


def _resized(tensor: Any, axes: Any, batch: int) -> Any:
    for axis, name in axes.items():
        if name == "batch":
            rows = [index % tensor.shape[axis] for index in range(batch)]
            return tensor.index_select(axis, tensor.new_tensor(rows).long())
    return tensor


if __name__ == "__main__":
    from runtime.bench import serve

    serve(open_network)
