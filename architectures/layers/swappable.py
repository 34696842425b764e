"""Functions that an exporter replaces while it traces a network, so that one network gives graphs of different operators.

@swappable
def attend(query, keys, values): ...        # what training and evaluation run

with attend.replaced_by(fused_attend):      # within the block, every layer calls fused_attend
    torch.onnx.export(network, …)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Swappable(Generic[P, R]):
    def __init__(self, function: Callable[P, R]) -> None:
        self.plain = function
        self._replacement: ContextVar[Callable[P, R] | None] = ContextVar(function.__name__, default=None)
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        return (self._replacement.get() or self.plain)(*args, **options)

    @contextmanager
    def replaced_by(self, function: Callable[P, R]) -> Iterator[None]:
        token = self._replacement.set(function)
        try:
            yield
        finally:
            self._replacement.reset(token)


def swappable(function: Callable[P, R]) -> Swappable[P, R]:
    return Swappable(function)
