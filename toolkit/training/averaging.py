"""Exponential moving average of the weights: a ← d a + (1 − d) w after every step, with a smaller d at first.

d_t = min(decay, (1 + t) / (10 + t)), so that the first, random weights are soon forgotten. What is not trained (running
statistics of batch norms) is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MovingAverage:
    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        self._trained = {name for name, _ in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, tensor in module.state_dict().items():
            if name in self._trained:
                self.weights[name].lerp_(tensor, 1 - decay)
            else:
                self.weights[name].copy_(tensor)

    def load(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)  # onto the device that the average is on
