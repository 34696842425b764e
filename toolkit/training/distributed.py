"""Several processes, one training: DistributedDataParallel under `torchrun`.

Every process draws the same batches and takes its share of the rows of each. Since losses are sums over known counts, the
averaged gradient is that of the whole batch, whatever the shares.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn

from runtime.errors import OptionError


@dataclass(frozen=True)
class Group:
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """One process alone writes files and speaks."""
        return self.rank == 0

    def share(self, rows: int) -> tuple[int, int]:
        """The rows of a batch that are this process's; all of them, for every process, where there are fewer than processes."""
        if rows < self.size:
            return 0, rows
        return rows * self.rank // self.size, rows * (self.rank + 1) // self.size

    def weight(self, rows: int) -> float:
        """What this process's loss counts for, so that the mean over processes is the loss of the whole batch."""
        return 1.0 if rows < self.size else float(self.size)

    def wait(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()

    def agree(self, network: nn.Module) -> None:
        """The leading process's running statistics for all: each has seen other rows."""
        if self.size > 1:
            for buffer in network.buffers():
                torch.distributed.broadcast(buffer, 0)

    def tell(self, values: dict[str, float]) -> dict[str, float]:
        """The leading process's figures for all, so that all decide alike."""
        if self.size == 1:
            return values
        told = [values]
        torch.distributed.broadcast_object_list(told, 0)
        return told[0]

    def wrap(self, module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module) if self.size > 1 else module


def join_group() -> Group:
    """The group that `torchrun` started this process in; a group of one without it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Group()
    if not torch.distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return Group(torch.distributed.get_rank(), size)


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise OptionError("training.device is cuda, but no GPU can be used here; leave it out, or set training.device=cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
