"""Dropout that is cheap on a CPU: y = x · keep / (1 − p), each `keep` 0 with probability p.

torch draws one random number for every element, which took a fifth of a Transformer's training step. Here one draw of 64 bits
decides eight elements, so p is rounded to a whole number of 256ths; the scale is that of the rounded p, and the mean of y is x.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

_LOWEST = -(2**63)


class Dropout(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.dropped = round(256 * probability)  # of 256

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.dropped == 0:
            return x
        if x.device.type != "cpu":
            return functional.dropout(x, self.probability, training=True)
        draws = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(_LOWEST, None)
        keep = draws.view(torch.uint8)[: x.numel()].view(x.shape) >= self.dropped
        return x * keep.to(x.dtype).mul_(256 / (256 - self.dropped))

    def extra_repr(self) -> str:
        return f"p={self.dropped}/256"
