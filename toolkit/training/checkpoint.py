"""A training state in one safetensors file, so that it is written in one step and read back bit for bit.

Tensors: weights.*, best.*, average.* (if there is one), optimizer.INDEX.*; everything else is JSON in the file's own header.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor, nn

from runtime.errors import SourceError
from runtime.files import write_file

CHECKPOINT_FILE = "checkpoint.safetensors"


@dataclass
class Progress:
    """How far training has come. An epoch is a pure function of this, the weights and the optimizer's state."""

    epoch: int = 0  # epochs done
    seconds: float = 0.0  # of training and evaluating
    scaler: dict[str, Any] = field(default_factory=dict)  # of fp16
    best_metric: float | None = None
    best_epoch: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


def save_checkpoint(
    directory: Path,
    module: nn.Module,
    best: dict[str, Tensor],
    average: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> None:
    tensors = {f"weights.{name}": tensor for name, tensor in module.state_dict().items()}
    tensors |= {f"best.{name}": tensor for name, tensor in best.items()}
    tensors |= {f"average.{name}": tensor for name, tensor in average.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    write_file(directory / CHECKPOINT_FILE, save(tensors, metadata={"progress": json.dumps(vars(progress))}))


def load_checkpoint(
    directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor], Progress]:
    """Restore `module` and `optimizer`; returns the best weights so far, the averaged ones, and the progress."""
    path = directory / CHECKPOINT_FILE
    try:
        with safetensors.safe_open(path, framework="pt") as archive:
            progress = Progress(**json.loads(archive.metadata()["progress"]))
            tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
        module.load_state_dict(_section(tensors, "weights."))
    except (OSError, safetensors.SafetensorError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{path} is damaged ({str(error).splitlines()[0]}); train again with --force") from None
    states: dict[int, dict[str, Any]] = {}
    for name, tensor in _section(tensors, "optimizer.").items():
        index, key = name.split(".", 1)
        states.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    return _section(tensors, "best."), _section(tensors, "average."), progress


def _section(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
