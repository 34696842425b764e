"""Trainings small enough for tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from toolkit.training import loop
from toolkit.training.recipe import Recipe


def recipe(architecture: str = "mlp", **settings: object) -> Recipe:
    """A tiny training without dropout."""
    defaults: dict[str, object] = {"epochs": 2, "threads": 1, "keep": "last"}
    if architecture == "mlp":
        defaults |= {"data.name": "digits", "data.limit": 300, "network.hidden": "16", "network.dropout": 0.0}
    return Recipe(architecture).with_settings(defaults | settings)


def train(chosen: Recipe, directory: Path) -> dict[str, torch.Tensor]:
    run, parts = loop.start(chosen, directory)
    loop.train(run, parts, directory)
    return load_file(directory / "weights.safetensors")


def train_cut_and_resumed(chosen: Recipe, directory: Path) -> dict[str, torch.Tensor]:
    """The same training, interrupted after its second epoch and taken up again."""
    run, parts = loop.start(chosen, directory)

    def interrupt(epoch: loop.Epoch) -> None:
        if epoch.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.train(run, parts, directory, interrupt)
    run, parts = loop.resume(directory)
    loop.train(run, parts, directory)
    return load_file(directory / "weights.safetensors")


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)
