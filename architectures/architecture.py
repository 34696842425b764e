"""Architecture: what the rest of Edgekit knows of a network — its configuration, how to build it, what it takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from runtime.signature import TensorSpec

from .settings import apply_settings


@dataclass(frozen=True)
class DataFacts:
    """What a network must know of the data it is trained on."""

    task: str
    shape: tuple[int, ...] = ()  # of one raw sample: (channels, height, width) or (columns,); empty for text
    outputs: int = 1  # number of classes, or 1 for a quantity
    rows: int = 0  # samples to train on
    vocabulary: int = 0  # text: number of tokens, the special ones included
    target_vocabulary: int = 0  # pairs of texts: the same for the second one
    longest: int = 0  # text: tokens in the longest sequence of either side, <bos> and <eos> included


@dataclass(frozen=True)
class Architecture:
    """A row of the catalogue.

    `config` is a frozen dataclass with the values this name stands for, `inputs` gives the tensors the network takes for a
    configuration (their first axis is "batch"), and `adapt` fits a configuration to data.
    """

    name: str
    description: str
    tasks: tuple[str, ...]  # the first is the default
    config: Any
    build: Callable[[Any], nn.Module]
    inputs: Callable[[Any], tuple[TensorSpec, ...]]
    adapt: Callable[[Any, DataFacts], Any]
    takes: tuple[str, ...] = ("image",)  # kinds of samples: "image", "columns" or "tokens"
    head: tuple[str, ...] = ()  # names of the submodules that a new task replaces; the rest are the features

    @property
    def task(self) -> str:
        return self.tasks[0]

    def configure(self, settings: Mapping[str, Any] | None = None, *, task: str | None = None) -> Any:
        """The configuration with `settings`; `task` is for networks that do several."""
        chosen = {"task": task} if task and hasattr(self.config, "task") else {}
        return apply_settings(self.config, {**chosen, **(settings or {})}, kind=f"{self.name} setting")

    def parameters(self, config: Any = None) -> int:
        """Number of parameters in a configuration, counted without allocating them; without one, the default."""
        import torch
        from torch.overrides import TorchFunctionMode

        class Unfilled(TorchFunctionMode):
            """Where tensors hold nothing, drawing their values is work for nothing, and most of the work here."""

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.__name__.endswith(("normal_", "uniform_")):  # of tensors, and those of nn.init
                    return args[0] if args else kwargs["tensor"]
                return func(*args, **(kwargs or {}))

        with torch.device("meta"), Unfilled():
            return sum(parameter.numel() for parameter in self.build(config or self.config).parameters())


def output_name(task: str) -> str:
    return {"regression": "value", "embedding": "embedding"}.get(task, "logits")
