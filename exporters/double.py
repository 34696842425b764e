"""A network computing in float64, to see what its float32 answers lose by rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn


@contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """The module itself in float64, and then as it was, bit for bit: float64 holds every narrower number exactly.

    It is no copy, which would be twice the network again: memory may hold one of several gigabytes in float64 alone, and not
    beside itself in float32.
    """
    changed: list[tuple[torch.Tensor, torch.dtype]] = []
    try:
        for tensor in chain(module.parameters(), module.buffers()):  # each once, however many modules share it
            if tensor.is_floating_point() or tensor.is_complex():
                changed.append((tensor, tensor.dtype))
                tensor.data = tensor.data.to(torch.complex128 if tensor.is_complex() else torch.float64)
        yield
    finally:
        for tensor, dtype in changed:
            tensor.data = tensor.data.to(dtype)
