"""Edgekit's runtime: opens a bundle and runs it, with numpy and onnxruntime and nothing else.

>>> import runtime
>>> model = runtime.load("lenet.bundle")
>>> model.predict(pixels).label
'7'

Names are imported on first use, so that asking for an error class does not load onnxruntime. Replaying goldens and timing
are modules of their own: `runtime.verify` and `runtime.bench`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bundle import Bundle
    from .errors import EdgekitError
    from .filling import Filling
    from .generation.constraints import Trie
    from .generation.options import Generation, Options
    from .model import Model, Prediction, load
    from .scoring import Score
    from .session import Session
    from .signature import GraphSignature, StateSpec, TensorSpec

__all__ = [
    "Bundle",
    "EdgekitError",
    "Filling",
    "Generation",
    "GraphSignature",
    "Model",
    "Options",
    "Prediction",
    "Score",
    "Session",
    "StateSpec",
    "TensorSpec",
    "Trie",
    "load",
]

_HOME = {
    "Bundle": "bundle",
    "EdgekitError": "errors",
    "Filling": "filling",
    "Generation": "generation.options",
    "GraphSignature": "signature",
    "Model": "model",
    "Options": "generation.options",
    "Prediction": "model",
    "Score": "scoring",
    "Session": "session",
    "StateSpec": "signature",
    "TensorSpec": "signature",
    "Trie": "generation.constraints",
    "load": "model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
