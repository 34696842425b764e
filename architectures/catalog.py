"""The one table of names. A network that is listed here is trained, exported, checked and tested without further mention."""

from __future__ import annotations

from runtime.errors import UnknownName

from .architecture import Architecture
from .lenet import LENET
from .linear import LINEAR, SOFTMAX
from .mlp import MLP_ARCHITECTURE

CATALOG: dict[str, Architecture] = {entry.name: entry for entry in (LINEAR, SOFTMAX, MLP_ARCHITECTURE, LENET)}


def find(name: str) -> Architecture:
    if name not in CATALOG:
        raise UnknownName.of("architecture", name, CATALOG)
    return CATALOG[name]
