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


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def random_numbers():
    return Random(), (torch.randn(2, 4),)


class Unstable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1 / ((x + 1e8) - 1e8 - x + 1e-9)


def unstable():
    return Unstable(), (torch.randn(2, 4),)


class ArgMax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


def whole_numbers():
    return ArgMax(), (torch.randn(2, 4),)


class Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x > 0, float("-inf"))


def masked():
    return Masked(), (torch.randn(2, 4),)


class Gather(nn.Module):
    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return xs[0] - xs[1]


def any_inputs():
    return Gather(), (torch.randn(2, 4), torch.randn(2, 4))


class GatherKeywords(nn.Module):
    def forward(self, **xs: torch.Tensor) -> torch.Tensor:
        return xs["a"] - xs["b"]


def any_keywords():
    return GatherKeywords(), {"a": torch.randn(2, 4), "b": torch.randn(2, 4)}


class SameName(nn.Module):
    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return output * 2


def same_name():
    return SameName(), (torch.randn(2, 4),)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x * factor


def scalar_input():
    return Scaled(), (torch.randn(2, 4), torch.tensor(3.0)), {"dynamic_axes": {"x": {0: "batch"}}}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0][:, -1]


def lstm():
    return Recurrent(), (torch.randn(2, 5, 8),)


class TwoHeads(nn.Module):
    """The first output survives int8; the second is a difference of near equals, which does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.body(x) + 100 - 100 - x @ self.body.weight.T.round(decimals=2)


def two_heads():
    return TwoHeads(), (torch.randn(4, 64),)


def leaves():
    raise SystemExit(0)


def prints():
    print("HELLO")
    return TwoInputs(), (torch.randn(2, 4), torch.randn(2, 4))


def one_logit():
    return nn.Linear(4, 1), (torch.randn(2, 4),), {"task": "classification"}


def few_labels():
    return nn.Linear(4, 3), (torch.randn(2, 4),), {"task": "classification", "labels": ["a"]}


def wide_regression():
    return nn.Linear(4, 3), (torch.randn(2, 4),), {"task": "regression"}


def four_classes():
    network = nn.Linear(4, 4, bias=False)
    network.weight.data = torch.eye(4)
    return network, (torch.randn(2, 4),), {"task": "classification"}


def double_precision():
    return nn.Linear(4, 3).double(), (torch.randn(2, 4).double(),)


def bfloat16():
    return nn.Linear(4, 3).bfloat16(), (torch.randn(2, 4).bfloat16(),)


def nothing_in_it():
    return nn.Linear(4, 3), (torch.randn(0, 4),)


def named_axis():
    return nn.Linear(4, 3), (torch.randn(2, 4),), {"dynamic_axes": {"input": "batch"}}


def labels_number():
    return nn.Linear(4, 3), (torch.randn(2, 4),), {"task": "classification", "labels": 3}


class IgnoresMask(nn.Module):
    """Reads its mask, but not while it is exported."""

    def forward(self, x, mask):
        seen = torch.ones_like(mask) if torch.compiler.is_exporting() else mask
        return x * seen.float().unsqueeze(-1) + 0 * mask.float().unsqueeze(-1)


def constant_mask():
    examples = {"x": torch.randn(3, 4, 2), "mask": torch.ones(3, 4, dtype=torch.bool)}
    return IgnoresMask(), examples, {"dynamic_axes": {"x": {0: "batch"}, "mask": {0: "batch"}}}


class ReturnsParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.scale, self.scale


def parameter_output():
    return ReturnsParameter(), torch.randn(3, 2), {"dynamic_axes": {"x": {0: "batch"}}}
