"""A network in float64 and back: more exact in between, and the same bits after."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from exporters.double import in_float64


class Odd(nn.Module):
    """Weights that two layers share, buffers of several types, and one that is in float64 anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.register_buffer("narrow", torch.randn(7).half())
        self.register_buffer("wide", torch.randn(7, dtype=torch.float64))
        self.register_buffer("turns", torch.randn(7, dtype=torch.complex64))
        self.register_buffer("count", torch.arange(7))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


def test_it_computes_in_float64() -> None:
    module, x = Odd(), torch.randn(3, 7)
    weight = module.first.weight.detach().double()
    exact = (x.double() @ weight.T + module.first.bias.double()) @ weight.T + module.second.bias.double()
    with in_float64(module), torch.inference_mode():
        torch.testing.assert_close(module(x.double()), exact, rtol=1e-14, atol=1e-14)
        assert module.turns.dtype == torch.complex128
        assert module.count.dtype == torch.int64


@pytest.mark.parametrize("failing", [False, True])
def test_afterwards_it_is_the_same_to_the_bit(failing: bool) -> None:
    module = Odd()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    objects = [id(tensor) for tensor in (*module.parameters(), *module.buffers())]
    try:
        with in_float64(module):
            if failing:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert failing
    after = module.state_dict()
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: tensor.dtype for name, tensor in before.items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert [id(tensor) for tensor in (*module.parameters(), *module.buffers())] == objects
    assert module.first.weight is module.second.weight
