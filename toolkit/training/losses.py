"""What each task minimises. A loss belongs to a recipe's task; `forward` never sees a target."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_for(task: str, target_deviation: float) -> Loss:
    """Cross-entropy, or squared error in units of the target's variance, so that one learning rate fits any unit."""
    if task == "classification":
        return functional.cross_entropy
    return lambda values, targets: functional.mse_loss(values[:, 0] / target_deviation, targets / target_deviation)
