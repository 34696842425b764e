"""Bundles that `edgekit wrap` made of tiny networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import runtime
from exporters.targets.wrap import wrap
from runtime.bundle import Bundle
from runtime.model import Model
from tests.runtime.generation.conftest import Make, tiny_network  # noqa: F401
from tests.runtime.generation.networks import Tiny

Wrap = Callable[..., Model]
BEAMS = 3


@pytest.fixture(scope="session")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Wrap:
    """wrapped(bundle, beams): the model of the bundle that `wrap` makes of it."""

    @cache
    def make(root: Path, beams: int, **options: Any) -> Model:
        target = tmp_path_factory.mktemp("wrapped") / "x.bundle"
        wrap(Bundle.open(root), target, beams=beams, **options)
        return runtime.load(target, device="cpu", threads=1)

    return lambda bundle, beams, **options: make(bundle.root, beams, **options)


@pytest.fixture
def gpt(tiny_network: Make) -> Tiny:  # noqa: F811
    return tiny_network("gpt", "portable")


@pytest.fixture
def translator(tiny_network: Make) -> Tiny:  # noqa: F811
    return tiny_network("seq2seq", "portable")
