"""Architecture: what the rest of Edgekit knows of a network — its configuration, how to build it, what it takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from runtime.signature import TensorSpec

from .settings import apply_settings


@dataclass(frozen=True)
class Architecture:
    """A row of the catalogue.

    `config` is a frozen dataclass with a default for every field. `input` gives the tensor the network takes for a
    configuration (its first axis is "batch"), and `adapt` fits a configuration to data: sample shape and number of outputs.
    """

    name: str
    description: str
    tasks: tuple[str, ...]  # the first is the default
    config: type
    build: Callable[[Any], nn.Module]
    input: Callable[[Any], TensorSpec]
    adapt: Callable[[Any, tuple[int, ...], int], Any]
    images_only: bool = False

    @property
    def task(self) -> str:
        return self.tasks[0]

    def configure(self, settings: Mapping[str, Any] | None = None) -> Any:
        return apply_settings(self.config(), settings or {}, kind=f"{self.name} setting")

    def parameters(self) -> int:
        """Number of parameters in the default configuration, counted without allocating them."""
        import torch

        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build(self.config()).parameters())


def output_name(task: str) -> str:
    return {"classification": "logits", "regression": "value"}[task]
