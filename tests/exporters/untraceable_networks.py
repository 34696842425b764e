"""Networks that cannot be traced, each for one reason, for test_user_network.py."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor, nn


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x


def branch():
    return Branch(), (torch.randn(2, 4),)


class BranchDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Branch())

    def forward(self, x: Tensor) -> OrderedDict:
        return OrderedDict(inner=self.inner(x), x=x)


def branch_deep():
    return BranchDeep(), (torch.randn(2, 4),)


class LoopOverValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        for step in range(int(x.abs().sum())):
            total = total + step
        return total


def loop_over_value():
    return LoopOverValue(), (torch.randn(2, 4),)


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        width = int(x.abs().max()) + 1
        return x.repeat_interleave(width)[: 4 if width > 3 else 2]


def item():
    return Item(), (torch.randn(2, 4),)


class ListOfValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * sorted(x[0].tolist())[0]


def sorted_values():
    return ListOfValues(), (torch.randn(2, 4),)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


def counts():
    return Counter(), (torch.randn(2, 4),)


class CountsInPython(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> dict:
        self.calls += 1
        return OrderedDict(y=x * self.calls)


def counts_in_python():
    return CountsInPython(), (torch.randn(2, 4),)


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.interp(x.numpy(), [0.0, 1.0], [0.0, 2.0]).astype(np.float32))


def numpy_inside():
    return Numpy(), (torch.randn(2, 4),)


class SingularValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(x)


def no_operator():
    return SingularValues(), (torch.randn(3, 4),)


class PythonRandom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


def python_random():
    return PythonRandom(), (torch.randn(2, 4),)
