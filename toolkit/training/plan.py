"""From a recipe to a run that can be trained: data loaded and split, network fitted to it. Nothing is trained here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from architectures.architecture import Architecture, DataFacts
from architectures.catalog import find
from architectures.finetune import freeze_features, take_over
from architectures.raw_input import RawInputNetwork
from architectures.run_directory import Run
from runtime.errors import DataError, OptionError, SourceError
from runtime.machine import available_cpus
from runtime.text import Tokenizer

from ..data.catalog import load_data
from ..data.preparation import Data, Prepared, prepare
from .recipe import Recipe, TrainingSettings
from .tasks import takes_segments


def plan(recipe: Recipe, tokenizers: Mapping[str, Tokenizer] | None = None) -> tuple[Run, Prepared]:
    """`tokenizers` are those the run already has, if it is resumed."""
    architecture = find(recipe.architecture)
    base = _base_run(recipe)
    inherited = {key: value for key, value in base.config.items() if key != "task"} if base else {}
    config = architecture.configure({**inherited, **recipe.network}, task=recipe.data.task)
    data = _load(recipe, architecture, config)
    task = _task_of(recipe, architecture, data)
    known = tokenizers or (base.load_tokenizers(recipe.training.start or "") if base else {})
    prepared = prepare(data, recipe.data, task=task, sentences=takes_segments(architecture, config), known=known)
    _check_settings(recipe, task, prepared.facts)
    config = _fitted(recipe, architecture, config, prepared.facts, data.name)
    positions = getattr(config, "max_positions", None)
    if task == "language-model" and positions is not None and recipe.training.window > positions:
        raise OptionError(
            f"training.window is {recipe.training.window} tokens, but the network has {positions} positions; "
            f"set training.window={positions} or less, or network.max_positions={recipe.training.window}"
        )
    threads = recipe.training.threads or available_cpus()
    recipe = replace(recipe, training=replace(recipe.training, threads=threads))
    about = {**asdict(recipe.data), "name": data.name, "fingerprint": data.fingerprint, "rows": prepared.rows}
    about.pop("path")  # a bundle must not carry a path of the machine it was made on
    run = Run(
        architecture.name,
        asdict(config),
        task,
        prepared.statistics,
        prepared.labels,
        about,
        recipe.to_json(),
        tuple(prepared.tokenizers),
    )
    return run, prepared


def start_weights(network: nn.Module, run: Run, settings: TrainingSettings) -> None:
    """Take over the weights of the run that the recipe starts from, and freeze them if asked."""
    architecture = find(run.architecture)
    inner = network.network if isinstance(network, RawInputNetwork) else network
    assert isinstance(inner, nn.Module)
    if settings.start is not None:
        base = Run.open(settings.start)
        weights = base.weights(settings.start)
        if base.preprocessing is not None:
            weights = {name.removeprefix("network."): tensor for name, tensor in weights.items() if name.startswith("network.")}
        take_over(inner, weights, architecture, origin=settings.start)
    if settings.freeze:
        freeze_features(inner, architecture)


def _check_settings(recipe: Recipe, task: str, facts: DataFacts) -> None:
    """Refuse settings that this data would leave without effect."""
    if recipe.training.augmentation and len(facts.shape) != 3:
        what = "columns" if facts.shape else "text"
        raise OptionError(f"training.shift, rotate, flip, crop and noise change images, but this data has {what}; remove them")
    if recipe.training.label_smoothing and task == "regression":
        raise OptionError("training.label_smoothing is for classes and tokens, but this data has quantities; remove it")


def _base_run(recipe: Recipe) -> Run | None:
    if recipe.training.start is None:
        return None
    base = Run.open(recipe.training.start)
    if base.architecture != recipe.architecture:
        raise SourceError(
            f"{recipe.training.start} holds a {base.architecture}, but this recipe trains a {recipe.architecture}; "
            "start from a run of the same architecture"
        )
    if base.status != "complete":
        raise SourceError(f"training in {recipe.training.start} has not finished; finish it first with --resume")
    return base


def _load(recipe: Recipe, architecture: Architecture, config: Any) -> Data:
    wanted = architecture.inputs(config)[0].shape[1:]
    image_size = int(wanted[1]) if len(wanted) == 3 else None
    if architecture.takes == ("image",) and Path(recipe.data.path or "").suffix.lower() in (".csv", ".tsv"):
        raise DataError(f"{architecture.name} takes images, but {recipe.data.path} is a table; use mlp, softmax or linear")
    return load_data(recipe.data, tasks=architecture.tasks, takes=architecture.takes, image_size=image_size)


def _task_of(recipe: Recipe, architecture: Architecture, data: Data) -> str:
    if recipe.data.task is not None:
        return recipe.data.task
    if data.task in architecture.tasks:
        return data.task
    return next(task for task in ("language-model", "masked-lm") if task in architecture.tasks)  # text without its labels


def _fitted(recipe: Recipe, architecture: Architecture, config: Any, facts: DataFacts, name: str) -> Any:
    adapted = architecture.adapt(config, facts)
    for key in recipe.network:
        if getattr(config, key) not in (0, getattr(adapted, key)):  # 0 asks for what the data needs
            raise OptionError(
                f"network.{key} is {getattr(config, key)}, but {name} needs {getattr(adapted, key)}; leave it out"
            )
    return adapted
