"""Gradient checkpointing: a block's activations are dropped and computed again on the way back. Less memory, more time."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from runtime.errors import OptionError


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The blocks that their class marks as `recomputable`."""
    blocks = [module for module in network.modules() if getattr(module, "recomputable", False)]
    if not blocks:
        raise OptionError("training.recompute is for networks of Transformer blocks, and this one has none; leave it out")
    return blocks


def recompute_blocks(network: nn.Module) -> None:
    for block in blocks_of(network):
        block.forward = _Recomputed(block.forward)


class _Recomputed:
    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return checkpoint(self.forward, *inputs, use_reentrant=False, **named)
