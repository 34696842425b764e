"""Nests of tensors, as networks take and return them, as flat named tensors, as graphs do.

A name is the path to a tensor: `past_key_values.0.1`. Whatever in a nest is not a tensor (a flag, None) is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .exportable import named_outputs


def flatten(name: str, value: Any) -> dict[str, Any]:
    """The leaves of a nest by path: tensors and constants."""
    leaves: dict[str, Any] = {}
    map_leaves(leaves.setdefault, name, value)
    return leaves


def map_leaves(function: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    """The same nest with `function(path, leaf)` in place of every leaf."""
    if isinstance(value, Mapping):
        items = {key: map_leaves(function, f"{name}.{key}", item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        parts = [map_leaves(function, f"{name}.{index}", item) for index, item in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(name, value)


def is_plain(value: Any) -> bool:
    """Whether the tracer takes this nest of outputs as it is: plain tuples, lists and dicts of tensors."""
    if isinstance(value, Tensor):
        return True
    if type(value) is dict:
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    return type(value) in (tuple, list) and all(map(is_plain, value))


class Flat(nn.Module):
    """A network as flat tensors in, flat tensors out: its arguments are rebuilt from `examples`, its result is taken apart."""

    def __init__(self, module: nn.Module, examples: Mapping[str, Any], by_keyword: bool) -> None:
        super().__init__()
        self.module = module
        self.by_keyword = by_keyword
        leaves = {path: leaf for name, value in examples.items() for path, leaf in flatten(name, value).items()}
        self.names = [path for path, leaf in leaves.items() if isinstance(leaf, Tensor)]
        # Without the example's tensors: a module must not carry them about, nor the tracer see them.
        self.templates = {name: map_leaves(_without_data, name, value) for name, value in examples.items()}

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, tensors, strict=True))
        arguments = {name: map_leaves(given.get, name, template) for name, template in self.templates.items()}
        result = self.module(**arguments) if self.by_keyword else self.module(*arguments.values())
        return tuple(tensor for _, tensor in named_outputs(result))


def _without_data(path: str, leaf: Any) -> Any:
    return None if isinstance(leaf, Tensor) else leaf
