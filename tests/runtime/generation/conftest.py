"""Tiny networks, each traced once for all test processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from runtime.bundle import Bundle
from runtime.text import Tokenizer

from .networks import TOKENIZER, Tiny, generating, has_laws, network, opened, write
from .quantized import FP32, IN_INT8, bundle_of, write_quantized

Make = Callable[..., Tiny]


@pytest.fixture(scope="session")
def tiny_network(shared: Callable[[str, Callable[[Path], object]], Path]) -> Make:
    """tiny_network("gpt", "portable"): the network and its model. `exact`: activations are not quantized, see quantized.py."""

    @cache
    def make(
        name: str, profile: str, tokenizer: Tokenizer = TOKENIZER, precision: str = FP32, exact: bool = False, **settings: Any
    ) -> Tiny:
        source = network(name, profile, tokenizer, **settings)
        kind = "-".join(["tiny", name, profile, str(len(tokenizer)), *settings])
        bundle = shared(kind, lambda folder: write(source, folder / "x.bundle")) / "x.bundle"
        if precision != FP32:
            made, original = bundle_of(precision), Bundle.open(bundle)
            bundle = (
                shared(
                    f"{kind}-{made}{'-exact' if exact else ''}",
                    lambda folder: write_quantized(original, made, folder / "x.bundle", exact=exact),
                )
                / "x.bundle"
            )
        return opened(source, bundle, precision)

    return make


# What the loop makes of logits is the same whatever they were computed in: of its choices these are tested in every precision,
# all of them in float32.
IN_EVERY_PRECISION: dict[str, tuple[Any, ...]] = {
    "mode": ("greedy", "beam", "sampled, several"),
    "length_penalty": (0.0, 1.0),
    "most_rows": (5,),
    "filtered": (True,),
    "options": ({}, {"beams": 3, "stop": ["ad", "eb", "cc"]}),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Laws of decoding are about the bundles there are, and of those that are the same about one."""
    items[:] = [item for item in items if _is_worth_it(getattr(item, "callspec", None))]


def _is_worth_it(chosen: Any) -> bool:
    params = {} if chosen is None else chosen.params
    case, precision = params.get("tiny") or params.get("exact"), params.get("precision")
    if precision is None or not isinstance(case, tuple):
        return True
    usual = all(params[key] in values for key, values in IN_EVERY_PRECISION.items() if key in params)
    return has_laws(case[0], precision) and (precision == FP32 or usual)


@pytest.fixture
def precision() -> str:
    """Of the networks of a test. Laws are tested at every one there is."""
    return FP32


@pytest.fixture(params=generating(), ids=lambda value: "-".join(value))
def tiny(request: pytest.FixtureRequest, tiny_network: Make, precision: str) -> Tiny:
    """Every generating network of the catalogue."""
    return tiny_network(*request.param, precision=precision)


@pytest.fixture(params=generating(), ids=lambda value: "-".join(value))
def exact(request: pytest.FixtureRequest, tiny_network: Make, precision: str) -> Tiny:
    """The same, to be compared with PyTorch: the activations of quantized ones are not rounded."""
    return tiny_network(*request.param, precision=precision, exact=precision in IN_INT8)
