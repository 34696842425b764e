"""Optimizer steps: batches in pieces and shares, mixed precision, clipping, schedule, moving average."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from architectures.finetune import hold_still
from runtime.errors import OptionError

from .averaging import MovingAverage
from .distributed import Group, pick_device
from .optimizers import make_optimizer
from .recipe import TrainingSettings
from .recompute import blocks_of, recompute_blocks
from .schedules import Schedule
from .tasks.task import Batch, State, Task

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Diverged(OptionError):
    """The loss is not a number any more."""


def check_possible(network: nn.Module, settings: TrainingSettings) -> None:
    """Refuse, before anything is written, what this machine or this network cannot do."""
    device = pick_device(settings.device)
    if settings.precision == "fp16" and device.type != "cuda":
        raise OptionError("training.precision fp16 needs a CUDA device; on the CPU use bf16")
    if settings.precision == "bf16" and device.type == "cpu":
        _refuse_deadly_bf16(_BF16_PRODUCT)
    if settings.recompute:
        blocks_of(network)


@cache
def _refuse_deadly_bf16(product: str) -> None:
    """Some virtual machines announce matrix instructions (AMX) that they forbid: there a product in bf16 ends the process."""
    tried = subprocess.run([sys.executable, "-c", product], capture_output=True, check=False)
    if tried.returncode < 0:
        raise OptionError(
            f"training.precision bf16 ends the process on this machine ({signal.Signals(-tried.returncode).name}: its CPU "
            "announces instructions that it does not allow); set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, "
            "or use float32"
        )


_BF16_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


class Stepper:
    """A network in training: everything that one epoch changes."""

    def __init__(
        self, network: nn.Module, task: Task, settings: TrainingSettings, group: Group, *, steps_an_epoch: int
    ) -> None:
        check_possible(network, settings)
        self.device = pick_device(settings.device)
        if settings.recompute:
            recompute_blocks(network)
        self.network = network.to(self.device)
        self.module = group.wrap(self.network)
        self.task = task
        self.settings = settings
        self.group = group
        self.optimizer = make_optimizer(self.network, settings)
        self.average = MovingAverage(self.network, settings.ema) if settings.ema is not None else None
        self.steps_an_epoch = steps_an_epoch
        self.schedule = Schedule(
            settings.schedule,
            settings.epochs * steps_an_epoch,
            settings.warmup,
            steps_an_epoch,
            settings.step_every,
            settings.step_factor,
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.precision == "fp16")

    def run_epoch(self, part: Any, epoch: int, on_step: Callable[[int, int], None]) -> tuple[float, float]:
        """One pass over the training part; returns the mean loss and the last learning rate."""
        seed = self.settings.seed * 1_000_003 + epoch
        torch.manual_seed(seed + 7919 * self.group.rank)  # dropout: other units in every process
        generator = torch.Generator().manual_seed(seed)
        self.module.train()
        hold_still(self.network)
        self._hold_ranges(epoch)
        step = epoch * self.steps_an_epoch
        states: list[State | None] = [None] * self.settings.accumulate
        total, items, rate = 0.0, 0, 0.0
        for batch in self.task.batches(part, generator):
            rate = self.settings.learning_rate * self.schedule.share(step)
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = rate
            loss = self._step(batch.to(self.device), states)
            if not math.isfinite(loss):
                raise Diverged(self._diagnosis(loss, step, epoch))
            total, items = total + loss * batch.counts[0], items + batch.counts[0]
            step += 1
            if self.average:
                self.average.update(self.network, step)
            on_step(step, self.schedule.steps)
        if not all(bool(parameter.isfinite().all()) for parameter in self.network.parameters()):
            raise Diverged(self._diagnosis(math.nan, step - 1, epoch))  # by the very last step, whose loss was still finite
        self.group.agree(self.network)
        return total / max(1, items), rate

    def _hold_ranges(self, epoch: int) -> None:
        """Fake quantization: in the last third of the epochs weights settle to ranges that do not move any more."""
        if self.settings.quantize is not None:
            from exporters.fake_quantization import hold_ranges

            hold_ranges(self.network, held=epoch > 0 and 3 * epoch >= 2 * self.settings.epochs)

    def _step(self, batch: Batch, states: list[State | None]) -> float:
        """One optimizer step; returns the loss of the whole batch."""
        self.optimizer.zero_grad()
        first, last = self.group.share(len(batch))
        pieces = min(self.settings.accumulate, last - first)
        edges = [first + (last - first) * index // pieces for index in range(pieces + 1)]
        total = torch.zeros((), device=self.device)
        for index in range(pieces):
            with self._unsynchronised(last_piece=index == pieces - 1):
                total += self._backward(batch.rows(edges[index], edges[index + 1]), states, index, len(batch))
        if self.group.size > 1:
            torch.distributed.all_reduce(total)
            total /= self.group.size
        if self.settings.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_([p for p in self.network.parameters() if p.grad is not None], self.settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(total)

    def _backward(self, piece: Batch, states: list[State | None], index: int, rows: int) -> Tensor:
        half = _HALF.get(self.settings.precision)
        with torch.autocast(self.device.type, dtype=half) if half else contextlib.nullcontext():
            sums, states[index] = self.task.losses(self.module, piece, states[index])
        parts = [loss / count for loss, count in zip(sums, piece.counts, strict=True)]
        loss = self.group.weight(rows) * torch.stack(parts).sum()
        self.scaler.scale(loss).backward()
        return loss.detach()

    def _unsynchronised(self, *, last_piece: bool) -> Any:
        """Gradients are exchanged once a step, after its last piece."""
        if isinstance(self.module, nn.parallel.DistributedDataParallel) and not last_piece:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def kept_weights(self) -> dict[str, Tensor]:
        """The weights to judge and to keep: the moving average, if there is one."""
        return self.average.weights if self.average else self.network.state_dict()

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The network with the weights to judge, in evaluation mode; the trained ones come back afterwards."""
        trained = {name: tensor.clone() for name, tensor in self.network.state_dict().items()} if self.average else None
        self.network.eval()
        if self.average:
            self.network.load_state_dict(self.average.weights)
        with parametrize.cached():
            yield self.network
        if trained is not None:
            self.network.load_state_dict(trained)

    def _diagnosis(self, loss: float, step: int, epoch: int) -> str:
        where = f"the loss became {loss} at step {step + 1} (epoch {epoch + 1})"
        smaller = f"--set training.learning_rate={self.settings.learning_rate / 10:g}"
        if step == 0:
            return f"{where}, the very first: the data is not finite, or its values are far too large; look at the data"
        if self.settings.precision == "fp16":
            return f"{where}; likely an overflow of fp16: use --set training.precision=bf16, or {smaller}"
        clip = "" if self.settings.clip is not None else ", or bound the gradient with --set training.clip=1"
        rate = f"likely the learning rate of {self.settings.learning_rate:g} is too high"
        return f"{where}; {rate}: take smaller steps with {smaller}{clip}"
