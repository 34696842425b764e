"""Dropout drops the share it says, keeps the mean, and does nothing in evaluation."""

from __future__ import annotations

import pytest
import torch

from architectures.layers.dropout import Dropout


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_it_drops_its_share_and_keeps_the_mean(probability: float) -> None:
    torch.manual_seed(0)
    y = Dropout(probability).train()(torch.ones(1000, 333))
    assert float((y == 0).float().mean()) == pytest.approx(probability, abs=0.004)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.01)
    assert len(y.unique()) == 2


def test_elements_are_dropped_independently() -> None:
    torch.manual_seed(0)
    dropped = (Dropout(0.5).train()(torch.ones(4096, 16)) == 0).double()
    correlation = torch.corrcoef(dropped.T) - torch.eye(16)
    assert float(correlation.abs().max()) < 0.08  # five deviations of 1/√4096


def test_it_does_nothing_in_evaluation_or_at_zero() -> None:
    x = torch.randn(3, 5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0).train()(x) is x


def test_the_same_seed_drops_the_same_elements_and_gradients_follow() -> None:
    x = torch.ones(7, 9, requires_grad=True)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(Dropout(0.3).train()(x))
    assert torch.equal(results[0], results[1])
    (gradient,) = torch.autograd.grad(results[0].sum(), x)
    assert torch.equal(gradient, results[0].detach())
