"""Networks that are unusual in one respect each, for test_user_network.py."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

# What comes out


@dataclass
class Detection:
    boxes: Tensor
    scores: Tensor
    extra: Tensor | None = None


class Pair(NamedTuple):
    mean: Tensor
    deviation: Tensor


class Dataclass(nn.Module):
    def forward(self, x: Tensor) -> Detection:
        return Detection(x * 2, x.sum(-1))


def dataclass_output():
    return Dataclass(), (torch.randn(2, 3),)


class Nested(nn.Module):
    def forward(self, x: Tensor) -> OrderedDict:
        return OrderedDict(pair=Pair(x.mean(-1), x.std(-1)), hidden=[x + 1, None, {"last": x - 1}])


def nested_output():
    return Nested(), (torch.randn(2, 3),)


class Number(nn.Module):
    def forward(self, x: Tensor) -> dict:
        return {"y": x, "loss": 0.5}


def number_output():
    return Number(), (torch.randn(2, 3),)


class Words(nn.Module):
    def forward(self, x: Tensor) -> dict:
        return {"y": x, "kind": "good"}


def text_output():
    return Words(), (torch.randn(2, 3),)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> tuple:
        return (None,)


def no_output():
    return Nothing(), (torch.randn(2, 3),)


# What goes in


class Cached(nn.Module):
    """One step of a decoder with a nest of keys and values."""

    def forward(self, x: Tensor, past_key_values: list, scale: float = 1.0, double: bool = False) -> tuple:
        present = [(torch.cat([k, x], 1), torch.cat([v, x * scale], 1)) for k, v in past_key_values]
        total = sum((k * 2 - v).sum(1) for k, v in present)
        return total * 2 if double else total, present


def nested_input():
    past = [(torch.randn(2, 5, 4), torch.randn(2, 5, 4)) for _ in range(2)]
    return Cached(), (torch.randn(2, 3, 4), past, 0.5, True)


def nested_keywords():
    return Cached(), {"past_key_values": [(torch.randn(2, 5, 4), torch.randn(2, 5, 4))], "x": torch.randn(2, 3, 4), "scale": 3}


class Subtract(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - 2 * b


def same_tensor():
    x = torch.randn(3, 4)
    return Subtract(), (x, x)


def shared_memory():
    x = torch.randn(6, 4)
    return Subtract(), {"a": x[:3], "b": x[3:]}


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x * 2


def works_in_place():
    return InPlace(), (torch.zeros(2, 4),)


def input_names():
    return Subtract(), (torch.randn(3, 4), torch.randn(3, 4)), {"input_names": ["left", "right"]}


def too_few_input_names():
    return Subtract(), (torch.randn(3, 4), torch.randn(3, 4)), {"input_names": ["left"]}


def names_for_a_dict():
    return Subtract(), {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}, {"input_names": ["left", "right"]}


def array_input():
    return Subtract(), (torch.randn(3, 4), np.zeros((3, 4)))


def sparse_input():
    return Subtract(), (torch.randn(3, 4), torch.eye(4).to_sparse())


def other_device():
    return Subtract(), (torch.randn(3, 4), torch.zeros(3, 4, device="meta"))


def float64_example():
    return nn.Linear(4, 2), (torch.randn(3, 4).double(),)


def module_on_meta():
    return nn.Linear(4, 2, device="meta"), (torch.randn(3, 4),)


def scripted():
    return torch.jit.script(nn.Linear(4, 2)), (torch.randn(3, 4),)


def quantized():
    network = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 2)), {nn.Linear})
    return network, (torch.randn(3, 4),)


def listed_axes():
    return nn.Linear(4, 3), (torch.randn(2, 5, 4),), {"dynamic_axes": {"input": [0, 1]}}


# Which sizes may vary


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.convolution(image).mean((2, 3))


def image():
    return Convolution(), (torch.randn(2, 3, 8, 8),)


def flattened_image():
    network = nn.Sequential(nn.Conv2d(1, 2, 5, padding=2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2 * 14 * 14, 3))
    return network, (torch.randn(2, 1, 28, 28),)


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.positions = nn.Parameter(torch.randn(6, 4))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return (self.tokens(tokens) + self.positions[: tokens.shape[1]]) * mask[..., None]


def full_length_tokens():
    return Embedder(), (torch.randint(0, 10, (2, 6)), torch.ones(2, 6))


class CrossAttention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value)


def attention():
    return CrossAttention(), tuple(torch.randn(2, 3, 5, 5) for _ in range(3))


class SkipsMask(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * 2 if bool(mask.all()) else x * mask


def idle_mask():
    return SkipsMask(), (torch.randn(2, 5), torch.ones(2, 5, dtype=torch.bool))


class Square(nn.Module):
    def forward(self, matrix: Tensor) -> Tensor:
        return matrix + matrix.transpose(1, 2)


def square():
    return Square(), (torch.randn(2, 3, 3),)


class Shift(nn.Module):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 1)) + shift


def broadcast():
    """Axis 0 of both is one, so each moves alone, but not both to different sizes; axis 1 of shift is broadcast."""
    return Shift(), (torch.randn(1, 4), torch.randn(1, 1))


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def reduced_one():
    return First(), (torch.randn(3, 1, 4),)


class Split(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.unbind(1))


def split():
    return Split(), (torch.randn(3, 4),)


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x[:, 0]
        for step in range(x.shape[1]):
            total = total + x[:, step] * step
        return total


def frozen():
    return Loop(), (torch.randn(2, 5, 4),)


def frozen_and_declared():
    return Loop(), (torch.randn(2, 5, 4),), {"dynamic_axes": {"x": {1: "time"}}}


class Fixed(nn.Module):
    """Runs at every size in PyTorch; the graph of the pooling is right at the example's size only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d(4), nn.Flatten())

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


def pooled():
    return Fixed(), (torch.randn(2, 1, 8, 8),)


class Divides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.shape[0] == 2)  # finite at the example's size only


def infinite_elsewhere():
    return Divides(), (torch.rand(2, 4),)


class OneExact(nn.Module):
    def __init__(self, example: Tensor) -> None:
        super().__init__()
        self.example = example

    def forward(self, x: Tensor) -> Tensor:
        if not torch.equal(x, self.example):
            raise ValueError("never seen")
        return x * 2


def exact():
    x = torch.randn(2, 4)
    return OneExact(x), (x,)


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled = x * 2
        return doubled.reshape(2, 20).sum(-1)


def number_in_reshape():
    return Written(), (torch.randn(2, 5, 4),), {"dynamic_axes": {"x": {1: "time"}}}


class Remembers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("attending to", x.shape)
        self.weights = x.softmax(-1)  # to be looked at, as teaching code does
        return self.weights * 2


def leaves_something_behind():
    return Remembers(), (torch.randn(2, 4),)


class Positive(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x[x > 0] * 2, torch.nonzero(x > 0), torch.unique(x.round())


def sizes_from_values():
    return Positive(), (torch.randn(3, 4),)
