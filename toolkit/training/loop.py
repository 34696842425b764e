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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from architectures.catalog import find
from architectures.run_directory import RUN_FILE, WEIGHTS_FILE, Run, is_run
from runtime.errors import DataError, OptionError, OutputExists
from runtime.files import refuse_existing, write_file
from runtime.machine import available_cpus
from runtime.metrics import METRICS

from ..data.catalog import load_data
from ..data.dataset import Dataset, Split, split
from .augment import shift
from .checkpoint import CHECKPOINT_FILE, Progress, load_checkpoint, save_checkpoint
from .losses import loss_for
from .recipe import Recipe
from .schedules import SCHEDULES

_CHECKPOINT_SECONDS = 1.0  # at most this much work is done twice after a kill
_EVALUATION_BATCH = 1024


class Diverged(OptionError):
    """The loss is not a number any more."""


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


def start(recipe: Recipe, directory: Path, *, force: bool = False) -> tuple[Run, Split]:
    """Prepare a run directory: load and split the data, fit the network to it. Nothing is trained yet."""
    refuse_existing(directory, force=force, marker=RUN_FILE)
    run, parts = _plan(recipe)
    _optimizer(run.build()[0], recipe.training)  # what cannot be built must fail before a directory is made
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        _discard(directory)
        run.save(directory)
    return run, parts


def resume(directory: Path, recipe: Recipe | None = None) -> tuple[Run, Split]:
    """Open an unfinished run again. `recipe`, if given, must be the one it began with."""
    if not is_run(directory):
        raise OptionError(f"there is no run at {directory} to resume; start one without --resume")
    run = Run.open(directory)
    recorded = Recipe.from_json(run.recipe, str(directory / RUN_FILE))
    if recipe is not None and recipe != replace(recorded, training=replace(recorded.training, threads=recipe.training.threads)):
        raise OptionError(
            f"the run at {directory} began with other settings; resume it with: edgekit train --resume -o {directory}"
        )
    again, parts = _plan(recorded)
    if again.data["fingerprint"] != run.data.get("fingerprint"):
        raise DataError(f"the data of the run at {directory} has changed since it began; train again with --force")
    return run, parts


def train(run: Run, parts: Split, directory: Path, on_epoch: Callable[[Epoch], None] = lambda epoch: None) -> Run:
    """Train to the end, from the last checkpoint if there is one, and complete the run directory."""
    with _locked(directory):
        current = Run.open(directory)
        if current.recipe != json.loads(json.dumps(run.recipe)):
            raise OutputExists(f"another training has replaced the run at {directory}; choose another -o")
        if current.status == "complete":
            return current
        return _train(run, parts, directory, on_epoch)


def _plan(recipe: Recipe) -> tuple[Run, Split]:
    architecture = find(recipe.architecture)
    config = architecture.configure(recipe.network)
    wanted = architecture.input(config).shape[1:]
    image_size = int(wanted[1]) if len(wanted) == 3 else None
    if architecture.images_only and Path(recipe.data.path or "").suffix.lower() in (".csv", ".tsv"):
        raise DataError(f"{architecture.name} takes images, but {recipe.data.path} is a table; use mlp, softmax or linear")
    data = load_data(recipe.data, tasks=architecture.tasks, image_size=image_size)
    parts = split(data, recipe.data)
    outputs = len(data.labels) if data.labels else 1
    shape = parts.statistics.shape
    if len(shape) == 1 and architecture.images_only:
        raise DataError(f"{architecture.name} takes images, but {data.name} has columns; use mlp, softmax or linear")
    if len(shape) == 1 and recipe.training.shift:
        raise OptionError("training.shift moves images, but this data has columns; remove it")
    adapted = architecture.adapt(config, shape, outputs)
    for key in recipe.network:
        if getattr(adapted, key) != getattr(config, key):
            raise OptionError(
                f"network.{key} is {getattr(config, key)}, but {data.name} needs {getattr(adapted, key)}; leave it out"
            )
    config = adapted
    threads = recipe.training.threads or available_cpus()
    recipe = replace(recipe, training=replace(recipe.training, threads=threads))
    about = {**asdict(recipe.data), "name": data.name, "fingerprint": data.fingerprint, "rows": len(data)}
    about.pop("path")  # a bundle must not carry a path of the machine it was made on
    run = Run(architecture.name, vars(config), data.task, parts.statistics, data.labels, about, recipe.to_json())
    return run, parts


def _train(run: Run, parts: Split, directory: Path, on_epoch: Callable[[Epoch], None]) -> Run:
    settings = Recipe.from_json(run.recipe, RUN_FILE).training
    torch.set_num_threads(settings.threads or 1)
    torch.manual_seed(settings.seed)
    module, _ = run.build()
    optimizer = _optimizer(module, settings)
    best, progress = {name: tensor.clone() for name, tensor in module.state_dict().items()}, Progress()
    if (directory / CHECKPOINT_FILE).exists():
        best, progress = load_checkpoint(directory, module, optimizer)
    loss_of = loss_for(run.task, run.preprocessing.target_deviation)
    metric = METRICS[run.task]
    saved_at = time.monotonic()
    while progress.epoch < settings.epochs and not _is_stale(progress, settings.patience):
        try:
            loss = _run_epoch(module, optimizer, loss_of, parts.train, settings, progress.epoch)
        except Diverged:
            _discard(directory)  # such weights are of no use, and would stand in the way of the next try
            raise
        value = metric.compute(predict(module, parts.validation), parts.validation.targets)
        progress.epoch += 1
        progress.history.append({"epoch": progress.epoch, "loss": loss, metric.name: value})
        if progress.best_metric is None or (
            value > progress.best_metric if metric.higher_is_better else value < progress.best_metric
        ):
            progress.best_metric, progress.best_epoch = value, progress.epoch
            best = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        on_epoch(Epoch(progress.epoch, settings.epochs, loss, metric.name, value, progress.best_metric, progress.best_epoch))
        if time.monotonic() - saved_at > _CHECKPOINT_SECONDS:
            save_checkpoint(directory, module, best, optimizer, progress)
            saved_at = time.monotonic()
    if settings.keep == "best":
        module.load_state_dict(best)
    return _complete(run, parts, directory, module, progress)


def _complete(run: Run, parts: Split, directory: Path, module: nn.Module, progress: Progress) -> Run:
    metric = METRICS[run.task]
    metrics = {
        "metric": metric.name,
        "validation": metric.compute(predict(module, parts.validation), parts.validation.targets),
        "test": metric.compute(predict(module, parts.test), parts.test.targets),
        "epochs": progress.epoch,
        "best_epoch": progress.best_epoch,
        "history": progress.history,
    }
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in module.state_dict().items()}
    write_file(directory / WEIGHTS_FILE, save(weights))
    run = replace(run, status="complete", metrics=metrics)
    run.save(directory)
    (directory / CHECKPOINT_FILE).unlink(missing_ok=True)
    return run


def _run_epoch(
    module: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Any, data: Dataset, settings: Any, epoch: int
) -> float:
    """One pass over the training part; returns the mean loss."""
    seed = settings.seed * 1_000_003 + epoch
    torch.manual_seed(seed)  # dropout
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data), generator=generator)
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * SCHEDULES[settings.schedule](epoch, settings.epochs)
    inputs, targets = torch.from_numpy(data.inputs), torch.from_numpy(data.targets)
    module.train()
    total = torch.zeros(())
    for rows in order.split(settings.batch_size or len(data)):
        optimizer.zero_grad()
        batch = shift(inputs[rows], settings.shift, generator) if settings.shift else inputs[rows]
        loss = loss_of(module(batch), targets[rows])
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(rows)
    mean = float(total) / len(data)
    if not torch.isfinite(total):
        raise Diverged(
            f"the loss became {mean} in epoch {epoch + 1}; take smaller steps with: "
            f"--set training.learning_rate={settings.learning_rate / 10:g}"
        )
    return mean


def predict(module: nn.Module, data: Dataset) -> Any:
    """Outputs of the network for every row, as numpy."""
    module.eval()
    with torch.inference_mode():
        return torch.cat([module(batch) for batch in torch.from_numpy(data.inputs).split(_EVALUATION_BATCH)]).numpy()


def _optimizer(module: nn.Module, settings: Any) -> torch.optim.Optimizer:
    parameters: Iterator[Tensor] = module.parameters()
    common = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9 if settings.momentum is None else settings.momentum, **common)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.optimizer](parameters, **common)


def _is_stale(progress: Progress, patience: int | None) -> bool:
    return patience is not None and 0 < patience <= progress.epoch - progress.best_epoch


def _discard(directory: Path) -> None:
    """Remove a run's own files; an empty directory goes with the lock."""
    for name in (WEIGHTS_FILE, CHECKPOINT_FILE, RUN_FILE):
        (directory / name).unlink(missing_ok=True)


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
