"""Where a token stands in its sequence, as a vector that is added to the token's embedding.

Sinusoidal (Vaswani et al., 2017), for even columns 2i and odd columns 2i + 1:

    table[p, 2i] = sin(p / 10000^(2i / width)),  table[p, 2i + 1] = cos(p / 10000^(2i / width))

or learned: one trained vector for each position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

POSITIONS = ("sinusoidal", "learned")


def positions_of(real: Tensor, time: int) -> Tensor:
    """Positions (batch, time) of the last `time` tokens of `real` (batch, past + time): how many real tokens stand before each.

    Padding thus counts for nothing; it is itself placed at 0, which no table is too short for.
    """
    return ((real.long().cumsum(dim=1) - 1) * real)[:, real.shape[1] - time :]


def sinusoidal_table(count: int, width: int) -> Tensor:
    position = torch.arange(count, dtype=torch.float64).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000) / width))
    angle = position * frequency  # (count, ⌈width / 2⌉)
    table = torch.stack((angle.sin(), angle.cos()), dim=2).flatten(1)[:, :width]  # (count, width)
    return table.to(torch.get_default_dtype())


class SinusoidalPositions(nn.Module):
    table: Tensor

    def __init__(self, *, count: int, width: int) -> None:
        super().__init__()
        self.register_buffer("table", sinusoidal_table(count, width), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return nn.functional.embedding(positions, self.table)  # (batch, time, width)


class LearnedPositions(nn.Module):
    """`offset` leaves that many rows unused at the start of the table, as in BART's weights."""

    def __init__(self, *, count: int, width: int, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.table = nn.Embedding(count + offset, width)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table(positions + self.offset)  # (batch, time, width)
