"""Tiny networks, each traced once for all test processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from runtime.text import Tokenizer

from .networks import TOKENIZER, Tiny, generating, network, opened, write

Make = Callable[..., Tiny]


@pytest.fixture(scope="session")
def tiny_network(shared: Callable[[str, Callable[[Path], object]], Path]) -> Make:
    """tiny_network("gpt", "portable"): the network and its model."""

    @cache
    def make(name: str, profile: str, tokenizer: Tokenizer = TOKENIZER, **settings: float) -> Tiny:
        source = network(name, profile, tokenizer, **settings)
        kind = f"tiny-{name}-{profile}-{len(tokenizer)}"
        folder = shared(kind, lambda folder: write(source, folder / "x.bundle"))
        return opened(source, folder / "x.bundle")

    return make


@pytest.fixture(params=generating(), ids=lambda value: "-".join(value))
def tiny(request: pytest.FixtureRequest, tiny_network: Make) -> Tiny:
    """Every generating network of the catalogue."""
    return tiny_network(*request.param)
