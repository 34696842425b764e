"""The one training loop.

Every epoch seeds its own random numbers from (seed, epoch), so an epoch is a pure function of the state before it. A run that
was killed at any moment therefore continues from its last checkpoint to the same final weights, bit for bit, on the CPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.utils import parametrize

from architectures.raw_input import RawInputNetwork
from architectures.run_directory import RUN_FILE, WEIGHTS_FILE, Run, is_run, tokenizer_file
from runtime.errors import DataError, OptionError, OutputExists
from runtime.files import refuse_existing, write_file

from ..data.preparation import Prepared
from .checkpoint import CHECKPOINT_FILE, Progress, load_checkpoint, save_checkpoint
from .distributed import Group, join_group
from .plan import plan, start_weights
from .recipe import Recipe
from .records import RECORD_FILES, check_drawing, write_records
from .steps import Diverged, Stepper, check_possible
from .tasks import task_for
from .tasks.samples import predict

__all__ = ["Diverged", "Epoch", "predict", "resume", "start", "train"]

_CHECKPOINT_SECONDS = 1.0  # after a kill at most this much work is done twice, or one epoch where that is longer


@dataclass(frozen=True)
class Epoch:
    """What a progress display shows after each epoch."""

    number: int
    total: int
    loss: float
    metric: str
    value: float
    best: float
    best_epoch: int

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  {self.metric} {self.value:.{2 if self.value < 1e5 else 0}f}"


def start(recipe: Recipe, directory: Path, *, force: bool = False) -> tuple[Run, Prepared]:
    """Prepare a run directory: load and split the data, fit the network to it. Nothing is trained yet."""
    group = join_group()
    if group.leads:
        refuse_existing(directory, force=force, marker=RUN_FILE)
    run, parts = plan(recipe)
    check_possible(_network(run), recipe.training)  # what cannot be done must fail before a directory is made
    check_drawing()
    if group.leads:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            _discard(directory)
            for name, tokenizer in parts.tokenizers.items():
                tokenizer.save(directory / tokenizer_file(name))
            run.save(directory)
    group.wait()
    return run, parts


def resume(directory: Path, recipe: Recipe | None = None) -> tuple[Run, Prepared]:
    """Open an unfinished run again. `recipe`, if given, must be the one it began with."""
    if not is_run(directory):
        raise OptionError(f"there is no run at {directory} to resume; start one without --resume")
    run = Run.open(directory)
    recorded = Recipe.from_json(run.recipe, str(directory / RUN_FILE))
    if recipe is not None and not _same_training(recipe, recorded):
        raise OptionError(
            f"the run at {directory} began with other settings; resume it with: edgekit train --resume -o {directory}"
        )
    again, parts = plan(recorded, run.load_tokenizers(directory))
    if again.data["fingerprint"] != run.data.get("fingerprint"):
        raise DataError(f"the data of the run at {directory} has changed since it began; train again with --force")
    return run, parts


def _same_training(recipe: Recipe, recorded: Recipe) -> bool:
    """Whether they differ in words or in threads alone; those stay what they were."""
    threads = replace(recipe.training, threads=recorded.training.threads)
    return replace(recipe, description=recorded.description, training=threads) == recorded


def train(
    run: Run,
    parts: Prepared,
    directory: Path,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Run:
    """Train to the end, from the last checkpoint if there is one, and complete the run directory."""
    group = join_group()
    with _locked(directory) if group.leads else contextlib.nullcontext():
        current = Run.open(directory)
        if current.recipe != json.loads(json.dumps(run.recipe)):
            raise OutputExists(f"another training has replaced the run at {directory}; choose another -o")
        group.wait()
        if current.status == "complete":
            return current
        return _train(run, parts, directory, group, on_epoch, on_step)


def _network(run: Run) -> nn.Module:
    """The network with its first weights: fresh ones, or those of the run it starts from."""
    settings = Recipe.from_json(run.recipe, RUN_FILE).training
    torch.manual_seed(settings.seed)
    network, _ = run.build()
    start_weights(network, run, settings)
    if settings.quantize is not None:
        from exporters.fake_quantization import attach  # needs onnx, which other trainings do without

        attach(network, settings.quantize)
    return network


def _train(
    run: Run,
    parts: Prepared,
    directory: Path,
    group: Group,
    on_epoch: Callable[[Epoch], None],
    on_step: Callable[[int, int], None],
) -> Run:
    settings = Recipe.from_json(run.recipe, RUN_FILE).training
    torch.set_num_threads(settings.threads or 1)
    network = _network(run)
    if isinstance(network, RawInputNetwork):
        network.remember(torch.from_numpy(parts.train.inputs), torch.from_numpy(parts.train.targets))
    task = task_for(run, settings, parts.tokenizers)
    stepper = Stepper(network, task, settings, group, steps_an_epoch=task.steps(parts.train))
    best, progress = _copy(stepper.kept_weights()), Progress()
    if (directory / CHECKPOINT_FILE).exists():
        best, average, progress = load_checkpoint(directory, stepper.network, stepper.optimizer)
        if stepper.average:
            stepper.average.load(average)
        if progress.scaler:
            stepper.scaler.load_state_dict(progress.scaler)
    saved_at = began = time.monotonic()
    before = progress.seconds
    while progress.epoch < settings.epochs and not _is_stale(progress, settings.patience):
        try:
            loss, rate = stepper.run_epoch(parts.train, progress.epoch, on_step)
        except Diverged:
            if group.leads and not (directory / CHECKPOINT_FILE).exists():
                _discard(directory)  # nothing of use, and it would stand in the way of the next try
            raise
        with stepper.evaluating() as module:
            values = group.tell(task.evaluate(module, parts.validation, quick=True))
        value = values[task.metric]
        progress.epoch += 1
        progress.scaler = stepper.scaler.state_dict()
        progress.seconds = before + time.monotonic() - began
        progress.history.append({"epoch": progress.epoch, "loss": loss, "learning_rate": rate, **values})
        if progress.best_metric is None or (
            value > progress.best_metric if task.higher_is_better else value < progress.best_metric
        ):
            progress.best_metric, progress.best_epoch = value, progress.epoch
            best = _copy(stepper.kept_weights())
        on_epoch(Epoch(progress.epoch, settings.epochs, loss, task.metric, value, progress.best_metric, progress.best_epoch))
        if group.leads and time.monotonic() - saved_at > _CHECKPOINT_SECONDS:
            average = stepper.average.weights if stepper.average else {}
            save_checkpoint(directory, stepper.network, best, average, stepper.optimizer, progress)
            saved_at = time.monotonic()
    stepper.network.load_state_dict(best if settings.keep == "best" else _copy(stepper.kept_weights()))
    if group.leads:
        run = _complete(run, parts, directory, stepper.network, task, progress)
    group.wait()
    return run


def _complete(run: Run, parts: Prepared, directory: Path, network: nn.Module, task: Any, progress: Progress) -> Run:
    with parametrize.cached():  # fake quantization: weights are rounded once, not at every call
        details = {name: task.evaluate(network, getattr(parts, name), quick=False) for name in ("validation", "test")}
    metrics = {
        "metric": task.metric,
        "validation": details["validation"][task.metric],
        "test": details["test"][task.metric],
        "details": details,
        "epochs": progress.epoch,
        "best_epoch": progress.best_epoch,
        "seconds": round(progress.seconds, 1),
        "history": progress.history,
    }
    run = replace(run, metrics=metrics)
    write_records(run, parts, directory, network, task)
    if run.recipe["training"].get("quantize"):
        from exporters.fake_quantization import remove

        remove(network)
    weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in network.state_dict().items()}
    write_file(directory / WEIGHTS_FILE, save(weights))
    run = replace(run, status="complete")
    run.save(directory)
    (directory / CHECKPOINT_FILE).unlink(missing_ok=True)
    return run


def _copy(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def _is_stale(progress: Progress, patience: int | None) -> bool:
    return patience is not None and 0 < patience <= progress.epoch - progress.best_epoch


def _discard(directory: Path) -> None:
    """Remove a run's own files; an empty directory goes with the lock."""
    for name in (WEIGHTS_FILE, CHECKPOINT_FILE, RUN_FILE, *RECORD_FILES):
        (directory / name).unlink(missing_ok=True)
    for path in directory.glob(tokenizer_file("*")):
        path.unlink()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One training at a time in a directory. The lock is on the directory itself and goes with the process, however it ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputExists(f"another training is running in {directory}; wait for it, or choose another -o") from None
        yield
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            directory.rmdir()  # only an empty one: nothing came of it
