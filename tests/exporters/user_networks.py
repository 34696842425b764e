"""Networks as users write them, for test_export.py."""

from __future__ import annotations

import torch
from torch import nn


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.linear(left) - 2 * self.linear(right)


def tuple_inputs():
    return TwoInputs(), (torch.randn(3, 4), torch.randn(3, 4))


def aliased_inputs():
    same = torch.randn(3, 4)
    return TwoInputs(), (same, same)


def dict_inputs():
    return TwoInputs(), {"right": torch.randn(1, 4), "left": torch.randn(1, 4)}


class DictOutput(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"double": x * 2, "parts": (x + 1, x.sum(-1))}


def dict_outputs():
    return DictOutput(), (torch.randn(2, 3),)


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens).mean(1)


def tokens():
    options = {"dynamic_axes": {"tokens": {0: "batch", 1: "time"}}, "output_names": ["vector"], "name": "embedder"}
    return Embedder(), (torch.arange(10)[None],), options


class Baked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(3, -1)  # the example's batch, written as a number


def baked():
    return Baked(), (torch.randn(3, 4),), {"dynamic_axes": {"x": {0: "batch"}}}


def fixed():
    return Baked(), (torch.randn(3, 4),)


class HardFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32) @ self.table.to(torch.float32) @ torch.eye(4, dtype=torch.float32)


def hard_float32():
    return HardFloat32(), (torch.randn(2, 4),)


class NotANumber(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(-x.abs() - 1)


def not_a_number():
    return NotANumber(), (torch.randn(2, 4),)


class DataDependent(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


def data_dependent():
    return DataDependent(), (torch.randn(2, 4),)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(image)).relu().mean((2, 3))


def normed():
    module = Normed().train()  # left in training mode, as people do
    return (
        module,
        (torch.randn(2, 3, 8, 8),),
        {"dynamic_axes": {"image": {0: "batch", 2: "height", 3: "width"}}, "task": "classification"},
    )


def raises():
    raise KeyError("no such layer")


def returns_nothing():
    return None


def returns_a_function():
    return (lambda x: x), (torch.zeros(1),)


def no_inputs():
    return TwoInputs(), ()


def number_input():
    return TwoInputs(), (torch.randn(1, 4), 3)


def wrong_option():
    return TwoInputs(), (torch.randn(2, 4), torch.randn(2, 4)), {"dynamic_axis": {}}


def wrong_axis():
    return TwoInputs(), (torch.randn(2, 4), torch.randn(2, 4)), {"dynamic_axes": {"left": {5: "batch"}}}


def wrong_example():
    return TwoInputs(), (torch.randn(2, 5), torch.randn(2, 5))
