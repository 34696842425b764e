"""Attention, positions and kernel regression against independent arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from architectures.architecture import DataFacts
from architectures.catalog import find
from architectures.kernel_regression import KernelRegression
from architectures.layers.attention import (
    AdditiveAttention,
    MultiHeadAttention,
    collect_attention,
    masked_softmax,
    see_all,
    see_earlier,
)
from architectures.layers.feedforward import FeedForward, make_activation
from architectures.layers.positions import LearnedPositions, SinusoidalPositions, positions_of, sinusoidal_table
from runtime.errors import OptionError, UnknownName


def some_mask(*rows: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masked_softmax_is_softmax_over_what_is_visible(dtype: torch.dtype) -> None:
    scores = (torch.randn(2, 4, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    visible = some_mask((1, 0, 1, 0), (0, 0, 0, 0))
    weights = masked_softmax(scores, visible)
    torch.testing.assert_close(weights[0, [0, 2]], scores[0, [0, 2]].softmax(-1))
    assert weights[0, [1, 3]].tolist() == [0, 0]
    assert weights[1].isfinite().all()
    assert weights[1].sum().item() == pytest.approx(1, abs=0.01)


def test_masks_say_who_sees_whom() -> None:
    real = some_mask((0, 1, 1, 1), (1, 1, 1, 0))
    assert see_all(real, 2).shape == (2, 1, 2, 4)
    assert see_all(real, 2)[0, 0, 1].tolist() == [False, True, True, True]
    rows = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert see_earlier(real, 4)[:, 0].int().tolist() == list(rows)
    assert torch.equal(see_earlier(real, 2), see_earlier(real, 4)[:, :, 2:])


def test_additive_attention_equals_its_formula() -> None:
    torch.manual_seed(0)
    attention = AdditiveAttention(query_width=3, key_width=4, hidden=5)
    query, memory, mask = torch.randn(2, 3), torch.randn(2, 6, 4), some_mask((1, 1, 1, 1, 0, 0), (1, 1, 1, 1, 1, 1))
    context, weights = attention(query, attention.project_keys(memory), memory, mask)
    w = {name: tensor.double().numpy() for name, tensor in attention.state_dict().items()}
    for row, length in enumerate((4, 6)):
        scores = [
            w["score.weight"][0] @ np.tanh(w["query.weight"] @ query[row].numpy() + w["key.weight"] @ key + w["key.bias"])
            for key in memory[row, :length].numpy()
        ]
        expected = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(weights[row, :length].detach().numpy(), expected, rtol=1e-5)
        assert weights[row, length:].tolist() == [0] * (6 - length)
        np.testing.assert_allclose(context[row].detach().numpy(), expected @ memory[row, :length].numpy(), rtol=1e-4, atol=1e-6)


def build_pair(width: int = 12, heads: int = 3) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    torch.manual_seed(0)
    ours = MultiHeadAttention(width=width, heads=heads).eval()
    theirs = nn.MultiheadAttention(width, heads, batch_first=True).eval()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([layer.weight for layer in (ours.query, ours.key, ours.value)]))
        theirs.in_proj_bias.copy_(torch.cat([layer.bias for layer in (ours.query, ours.key, ours.value)]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())
    return ours, theirs


def test_multi_head_attention_equals_that_of_torch() -> None:
    ours, theirs = build_pair()
    x, memory, real = torch.randn(2, 5, 12), torch.randn(2, 4, 12), some_mask((1, 1, 1, 0), (1, 1, 1, 1))
    expected, expected_weights = theirs(x, memory, memory, key_padding_mask=~real, average_attn_weights=False)
    with collect_attention(ours) as collected:
        actual, keys, values = ours(x, *ours.project(memory), see_all(real, 5))
    (weights,) = collected[""]
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(weights, expected_weights)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
    assert (weights[0, ..., 3] == 0).all()
    assert keys.shape == values.shape == (2, 3, 4, 4)
    mixed = (weights @ values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours.output(mixed), actual)


def test_causal_attention_equals_that_of_torch() -> None:
    ours, theirs = build_pair()
    x = torch.randn(2, 5, 12)
    expected, _ = theirs(x, x, x, attn_mask=nn.Transformer.generate_square_subsequent_mask(5), need_weights=False)
    actual, _, _ = ours(x, *ours.project(x), see_earlier(torch.ones(2, 5, dtype=torch.bool), 5))
    torch.testing.assert_close(actual, expected)


def test_attention_with_a_past_equals_attention_without() -> None:
    ours, _ = build_pair()
    x, real = torch.randn(2, 6, 12), torch.ones(2, 6, dtype=torch.bool)
    whole, keys, values = ours(x, *ours.project(x), see_earlier(real, 6))
    past = torch.zeros(2, 3, 0, 4), torch.zeros(2, 3, 0, 4)
    parts, done = [], 0
    with collect_attention(ours) as collected:
        for size in (2, 1, 3):
            piece = x[:, done : done + size]
            done += size
            part, *past = ours(piece, *ours.project(piece), see_earlier(real[:, :done], size), *past)
            parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(past, [keys, values])
    assert [weights.shape[2:] for weights in collected[""]] == [(2, 2), (1, 3), (3, 6)]


def test_looking_at_attention_changes_nothing_and_ends_with_the_block() -> None:
    network = nn.ModuleDict({"add": AdditiveAttention(query_width=3, key_width=4, hidden=5)})
    query, memory, mask = torch.randn(2, 3), torch.randn(2, 6, 4), torch.ones(2, 6, dtype=torch.bool)
    arguments = query, network["add"].project_keys(memory), memory, mask
    expected = network["add"](*arguments)
    with pytest.raises(ZeroDivisionError), collect_attention(network) as collected:
        for _ in range(3):
            actual = network["add"](*arguments)
        assert torch.equal(actual[0], expected[0])
        assert len(collected["add"]) == 3
        assert torch.equal(collected["add"][2], expected[1])
        raise ZeroDivisionError
    network["add"](*arguments)
    assert len(collected["add"]) == 3


def test_attention_drops_weights_in_training_only() -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(width=4, heads=2, dropout=0.5)
    x, visible = torch.randn(1, 6, 4), torch.ones(1, 1, 6, 6, dtype=torch.bool)
    assert not torch.equal(attention(x, *attention.project(x), visible)[0], attention(x, *attention.project(x), visible)[0])
    attention.eval()
    assert torch.equal(attention(x, *attention.project(x), visible)[0], attention(x, *attention.project(x), visible)[0])


def test_impossible_layers_are_refused() -> None:
    with pytest.raises(OptionError, match="width 10 cannot be divided into 3 heads"):
        MultiHeadAttention(width=10, heads=3)
    with pytest.raises(OptionError, match="sizes must be 1 or more"):
        AdditiveAttention(query_width=3, key_width=0, hidden=5)
    with pytest.raises(UnknownName, match="known: gelu, gelu-tanh, relu"):
        make_activation("swish")


def test_the_sinusoidal_table_is_the_papers() -> None:
    for width in (6, 7):
        table = sinusoidal_table(50, width)
        for position in (0, 1, 17, 49):
            for column in range(width):
                angle = position / 10_000 ** (2 * (column // 2) / width)
                expected = math.cos(angle) if column % 2 else math.sin(angle)
                assert table[position, column].item() == pytest.approx(expected, abs=1e-6)


def test_positions_count_real_tokens_only() -> None:
    real = some_mask((0, 0, 1, 1, 1), (1, 1, 1, 0, 0), (1, 0, 1, 0, 1))
    assert positions_of(real, 5).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0], [0, 0, 1, 0, 2]]
    assert torch.equal(positions_of(real, 2), positions_of(real, 5)[:, 3:])


def test_position_layers_look_up_their_table() -> None:
    places = torch.tensor([[0, 3], [2, 2]])
    fixed = SinusoidalPositions(count=4, width=6)
    assert torch.equal(fixed(places), sinusoidal_table(4, 6)[places])
    assert not fixed.state_dict()
    learned = LearnedPositions(count=4, width=6, offset=2)
    assert learned.table.weight.shape == (6, 6)
    assert torch.equal(learned(places), learned.table.weight[places + 2])


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu-tanh"])
def test_feed_forward_equals_its_formula(activation: str) -> None:
    torch.manual_seed(0)
    module = FeedForward(width=3, hidden=7, activation=activation).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    w = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    hidden = x.numpy() @ w["expand.weight"].T + w["expand.bias"]
    formula = {
        "relu": lambda v: max(0.0, v),
        "gelu": lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))),
        "gelu-tanh": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    }[activation]
    expected = np.vectorize(formula)(hidden) @ w["contract.weight"].T + w["contract.bias"]
    np.testing.assert_allclose(module(x).detach().numpy(), expected, rtol=1e-9)


def by_hand(x: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: np.ndarray, *, leave_out: bool) -> np.ndarray:
    answers = []
    for row in x:
        total, weighted = 0.0, np.zeros(values.shape[1])
        for key, value in zip(keys, values, strict=True):
            if leave_out and np.array_equal(row, key):
                continue
            weight = math.exp(-0.5 * sum((scale * (row - key)) ** 2))
            total, weighted = total + weight, weighted + weight * value
        answers.append(weighted / total)
    return np.array(answers)


@pytest.mark.parametrize("training", [False, True])
def test_kernel_regression_is_a_weighted_mean_and_leaves_the_query_out_in_training(training: bool) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((20, 3)).astype(np.float32), generator.standard_normal((20, 2)).astype(np.float32)
    module = KernelRegression(features=3, outputs=2, keys=20).train(training)
    module.remember(torch.tensor(x), torch.tensor(y))
    scale = np.array([1.0, 0.5, 2.0])
    with torch.no_grad():
        assert module.inverse_bandwidth.tolist() == [1, 1, 1]
        module.inverse_bandwidth.copy_(torch.tensor(scale))
    expected = by_hand(x, x, y, scale, leave_out=training)
    np.testing.assert_allclose(module(torch.tensor(x)).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_kernel_regression_remembers_rows_from_first_to_last() -> None:
    module = KernelRegression(features=1, outputs=1, keys=4)
    module.remember(torch.arange(10.0)[:, None], torch.arange(10.0) * 2)
    assert module.keys.flatten().tolist() == [0, 3, 6, 9]
    assert module.values.flatten().tolist() == [0, 6, 12, 18]
    assert set(module.state_dict()) == {"inverse_bandwidth", "keys", "values"}
    with pytest.raises(OptionError, match="keeps 4 rows but there are 3; set network.keys=3"):
        module.remember(torch.zeros(3, 1), torch.zeros(3))


def test_kernel_regression_keeps_no_more_rows_than_there_are() -> None:
    entry = find("kernel-regression")
    facts = DataFacts(task="regression", shape=(7,), rows=30)
    assert entry.adapt(entry.config, facts).keys == 30
    assert entry.adapt(entry.configure({"keys": 5}), facts).keys == 5
    assert entry.adapt(entry.configure({"keys": 0}), facts).keys == 30  # all
    with pytest.raises(OptionError, match="sizes must be 1 or more"):
        entry.configure({"keys": -1})
