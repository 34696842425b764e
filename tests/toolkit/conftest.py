"""Small texts to train on."""

from __future__ import annotations

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
