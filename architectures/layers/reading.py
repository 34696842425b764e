"""How a decoder reads the tokens of one call: which are real, where they stand, and which keys they may see.

What is remembered between calls is the first part of the state, the record: here (batch, past), true where a token was real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention import see_earlier
from .positions import positions_of
from .swappable import swappable


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Reading:
    tokens: Tensor  # (batch, time), in the order the layers see them
    positions: Tensor  # (batch, time)
    visible: Any  # for `attend`: here a mask (batch, 1, time, past + time)
    record: Tensor  # the new first part of the state
    restore: Callable[[Tensor], Tensor] = _unchanged  # (batch, time, …) back in the order the tokens were given


@swappable
def read(tokens: Tensor, pad: int, record: Tensor) -> Reading:
    """tokens (batch, time) that follow what `record` tells of; those equal to `pad` are padding."""
    time = tokens.shape[1]
    real = torch.cat((record, tokens != pad), dim=1)  # (batch, past + time)
    return Reading(tokens, positions_of(real, time), see_earlier(real, time), real)


@swappable
def choose(x: Tensor) -> Tensor:
    """The positions of x (batch, time, width) whose logits are wanted: all. Every decoder calls this before its head,
    or as soon as the other positions are of no use any more."""
    return x


def shift_to_front(tokens: Tensor, pad: int) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Each row of tokens (batch, time) rolled so that its real tokens come first, how many they are (batch,), and the way back.

    For layers that can leave out padding only at the end. Padding inside a sequence stays where it is.
    """
    real = tokens != pad
    time = tokens.shape[1]
    steps = torch.arange(time, device=tokens.device)
    first = real.long().argmax(dim=1, keepdim=True)  # (batch, 1): where the real tokens begin
    source = steps + first  # (batch, time), beyond the end where it must go on at the beginning
    target = steps - first

    def restore(x: Tensor) -> Tensor:
        index = torch.where(target < 0, target + time, target).unsqueeze(-1)  # (batch, time, 1)
        return x.gather(1, index.expand(-1, -1, x.shape[2]))

    return tokens.gather(1, torch.where(source >= time, source - time, source)), real.sum(dim=1), restore
