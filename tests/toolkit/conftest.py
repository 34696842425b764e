"""Small texts to train on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    lines = [" ".join(random.choice(words, size=8)) + "." for _ in range(120)]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(lines))
    return path


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    """Letters to their names: a task that a small network learns quickly."""
    random = np.random.default_rng(0)
    names = {"a": "AY", "b": "BEE", "c": "SEE", "d": "DEE"}
    words = sorted({"".join(random.choice(list(names), size=random.integers(1, 6))) for _ in range(300)})
    path = tmp_path / "pairs.tsv"
    path.write_text("source\ttarget\n" + "".join(f"{word}\t{' '.join(names[c] for c in word)}\n" for word in words))
    return path


@pytest.fixture
def gpt(shared: Callable[[str, Callable[[Path], object]], Path], text_file: Path) -> Path:
    """The bundle of a trained language model, beside its run."""

    def make(folder: Path) -> None:
        from exporters.export import export
        from exporters.source import find_source

        from .tiny import recipe, train

        tiny = {"network.width": 16, "network.heads": 2, "network.layers": 1, "network.feedforward": 32}
        train(recipe("gpt", **tiny, **{"data.path": str(text_file), "window": 16}), folder / "run")
        export(find_source(str(folder / "run")), folder / "gpt.bundle")

    return shared("tiny-gpt", make) / "gpt.bundle"
