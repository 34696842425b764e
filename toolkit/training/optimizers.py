"""The optimizer of a recipe. Weight decay pulls on matrices and kernels alone: biases, norms and other vectors are spared."""

from __future__ import annotations

import torch
from torch import nn

from .recipe import TrainingSettings


def make_optimizer(module: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "sgd":
        momentum = 0.9 if settings.momentum is None else settings.momentum
        return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=momentum)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.optimizer]
    return kind(groups, lr=settings.learning_rate, betas=(0.9, settings.beta2))
