"""Recurrent encoder–decoders: their protocol, their laws, and the attention decoder against the paper's equations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from architectures.architecture import DataFacts
from architectures.catalog import find
from architectures.seq2seq import AttentionSeq2Seq, Seq2SeqConfig
from runtime.errors import OptionError

SOURCE = torch.tensor([[5, 6, 7, 2, 0], [8, 2, 0, 0, 0], [4, 9, 5, 8, 2]])
TARGET = torch.tensor([[1, 5, 9, 4, 0, 0], [1, 7, 4, 4, 8, 5], [1, 0, 0, 0, 0, 0]])
VARIANTS = [
    (name, {"kind": kind, "bidirectional": bidirectional, "layers": layers})
    for name in ("seq2seq", "seq2seq-attention")
    for kind, bidirectional, layers in (("gru", False, 1), ("gru", True, 2), ("lstm", True, 1), ("lstm", False, 2))
]
every_variant = pytest.mark.parametrize(("name", "settings"), VARIANTS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(name: str, settings: dict | None = None) -> nn.Module:
    architecture = find(name)
    small = {"vocabulary": 10, "target_vocabulary": 11, "embedding": 6, "hidden": 4}
    return architecture.build(architecture.configure(small | (settings or {}))).eval()


def attention_weights(network: AttentionSeq2Seq, source: Tensor, tokens: Tensor) -> Tensor:
    """(batch, time, source), collected by a hook, as for an alignment plot."""
    steps: list[Tensor] = []
    handle = network.decoder.attention.register_forward_hook(lambda module, inputs, outputs: steps.append(outputs[1]))
    network(source, tokens)
    handle.remove()
    return torch.stack(steps, dim=1)


@every_variant
def test_decoding_one_token_at_a_time_equals_decoding_all_at_once(name: str, settings: dict) -> None:
    network = build(name, settings)
    memory, state = network.encode(SOURCE)
    whole, last_state = network.decode(TARGET, memory, state)
    assert whole.shape == (3, 6, 11)
    torch.testing.assert_close(network(SOURCE, TARGET), whole)
    steps = []
    for step in range(TARGET.shape[1]):
        logits, state = network.decode(TARGET[:, step : step + 1], memory, state)
        steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)
    torch.testing.assert_close(state, last_state)


@every_variant
def test_memory_and_state_are_flat_and_have_the_batch_where_they_say(name: str, settings: dict) -> None:
    network = build(name, settings)
    memory, state = network.encode(SOURCE)
    assert all(isinstance(part, Tensor) and part.shape[0] == 3 for part in memory)
    assert network.state_batch_axis == 1
    expected = (settings["layers"], 3, 4)
    assert [tuple(part.shape) for part in state] == [expected] * (2 if settings["kind"] == "lstm" else 1)
    order = torch.tensor([2, 0, 1])
    logits, after = network.decode(TARGET[:, :1], memory, state)
    moved = network.decode(
        TARGET[order, :1], tuple(part[order] for part in memory), tuple(part.index_select(1, order) for part in state)
    )
    torch.testing.assert_close(moved, (logits[order], tuple(part.index_select(1, order) for part in after)))


@every_variant
def test_padding_on_either_side_never_changes_a_real_position(name: str, settings: dict) -> None:
    network = build(name, settings)
    logits = network(SOURCE, TARGET)
    wider = network(nn.functional.pad(SOURCE, (0, 3)), nn.functional.pad(TARGET, (0, 2)))
    torch.testing.assert_close(wider[:, :6], logits)
    for row in range(3):
        length, steps = int((SOURCE[row] != 0).sum()), int((TARGET[row] != 0).sum())
        alone = network(SOURCE[row : row + 1, :length], TARGET[row : row + 1, :steps])
        torch.testing.assert_close(alone[0], logits[row, :steps])


@every_variant
def test_future_target_tokens_never_change_earlier_logits_and_the_source_does(name: str, settings: dict) -> None:
    network = build(name, settings)
    before = network(SOURCE, TARGET)
    changed = TARGET.clone()
    changed[:, 3:] = 10
    after = network(SOURCE, changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.isclose(before[:, 3], after[:, 3]).all()
    other = SOURCE.clone()
    other[:, 0] = 3
    assert not torch.isclose(network(other, TARGET)[:, 0], before[:, 0]).all(dim=-1).any()


@every_variant
def test_every_weight_learns(name: str, settings: dict) -> None:
    network = build(name, settings).train()
    network(SOURCE, TARGET).square().sum().backward()
    idle = [key for key, parameter in network.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert idle == []


def test_a_source_of_only_padding_gives_finite_logits() -> None:
    for name in ("seq2seq", "seq2seq-attention"):
        assert build(name)(torch.zeros(2, 3, dtype=torch.long), TARGET[:2]).isfinite().all()


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_attention_weights_sum_to_one_over_real_source_positions_and_are_zero_on_padding(kind: str) -> None:
    weights = attention_weights(build("seq2seq-attention", {"kind": kind}), SOURCE, TARGET)
    assert weights.shape == (3, 6, 5)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(3, 6))
    padding = (SOURCE == 0)[:, None].expand(-1, 6, -1)
    assert not weights[padding].any()
    assert (weights[~padding] > 0).all()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gru_by_hand(w: dict[str, np.ndarray], prefix: str, suffix: str, x: np.ndarray, h: np.ndarray) -> np.ndarray:
    inward = w[f"{prefix}weight_ih{suffix}"] @ x + w[f"{prefix}bias_ih{suffix}"]
    recurrent = w[f"{prefix}weight_hh{suffix}"] @ h + w[f"{prefix}bias_hh{suffix}"]
    (ir, iz, candidate), (hr, hz, hn) = np.split(inward, 3), np.split(recurrent, 3)
    r, z = sigmoid(ir + hr), sigmoid(iz + hz)
    return (1 - z) * np.tanh(candidate + r * hn) + z * h


def bahdanau_by_hand(w: dict[str, np.ndarray], source: list[int], target: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits (time, vocabulary) and attention weights (time, source) of one unpadded pair, a number at a time."""
    annotations: list[list[np.ndarray]] = [[], []]
    for direction in (0, 1):
        h = np.zeros(4)
        for token in source[:: -1 if direction else 1]:
            h = gru_by_hand(w, f"encoder.recurrent.layers.0.{direction}.", "_l0", w["encoder.embedding.weight"][token], h)
            annotations[direction].append(h)
    ends = np.concatenate([annotations[0][-1], annotations[1][-1]])
    memory = [np.concatenate(pair) for pair in zip(annotations[0], annotations[1][::-1], strict=True)]
    s = np.tanh(w["encoder.bridges.0.linear.weight"] @ ends + w["encoder.bridges.0.linear.bias"])
    logits, alignment = [], []
    for token in target:
        y = w["embedding.weight"][token]
        score, query = w["decoder.attention.score.weight"][0], w["decoder.attention.query.weight"]
        key, bias = w["decoder.attention.key.weight"], w["decoder.attention.key.bias"]
        energies = np.array([score @ np.tanh(query @ s + key @ m + bias) for m in memory])
        weights = np.exp(energies) / np.exp(energies).sum()
        context = sum(a * m for a, m in zip(weights, memory, strict=True))
        s = gru_by_hand(w, "decoder.cells.0.", "", np.concatenate([y, context]), s)
        t = w["readout.weight"] @ np.concatenate([s, context, y]) + w["readout.bias"]
        maxout = np.array([max(t[2 * unit], t[2 * unit + 1]) for unit in range(len(t) // 2)])
        logits.append(w["output.weight"] @ maxout + w["output.bias"])
        alignment.append(weights)
    return np.array(logits), np.array(alignment)


def test_the_attention_network_is_bahdanaus_equations() -> None:
    network = build("seq2seq-attention").double()
    w = {name: value.numpy() for name, value in network.state_dict().items()}
    logits, weights = network(SOURCE, TARGET), attention_weights(network, SOURCE, TARGET)
    for row in range(3):
        source = [token for token in SOURCE[row].tolist() if token]
        target = [token for token in TARGET[row].tolist() if token]
        expected, alignment = bahdanau_by_hand(w, source, target)
        np.testing.assert_allclose(logits[row, : len(target)].detach().numpy(), expected, rtol=1e-10, atol=1e-12)
        actual = weights[row, : len(target), : len(source)].detach().numpy()
        np.testing.assert_allclose(actual, alignment, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_plain_seq2seq_is_an_encoder_whose_last_state_starts_the_decoder_and_joins_its_inputs(kind: str) -> None:
    network = build("seq2seq", {"kind": kind})
    encoder, decoder = network.encoder.recurrent.layers[0][0], network.decoder.layers[0][0]
    source, tokens = SOURCE[2:], TARGET[1:2]
    _, state = encoder(network.encoder.embedding(source))
    context = (state[0] if kind == "lstm" else state)[0]
    joined = torch.cat([network.embedding(tokens), context.expand(6, -1)[None]], dim=-1)
    h, _ = decoder(joined, state)
    torch.testing.assert_close(network(source, tokens), network.output(h))


@every_variant
def test_dropout_acts_in_training_only(name: str, settings: dict) -> None:
    network = build(name, {**settings, "dropout": 0.5})
    assert torch.equal(network(SOURCE, TARGET), network(SOURCE, TARGET))
    network.train()
    assert not torch.equal(network(SOURCE, TARGET), network(SOURCE, TARGET))


def test_an_encoder_decoder_is_fitted_to_both_vocabularies() -> None:
    architecture = find("seq2seq-attention")
    fitted = architecture.adapt(architecture.config, DataFacts("seq2seq", vocabulary=31, target_vocabulary=43))
    assert (fitted.vocabulary, fitted.target_vocabulary, fitted.bidirectional) == (31, 43, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "rnn"}, "kind is 'rnn', expected one of: gru, lstm"),
        ({"layers": 0}, "sizes must be 1 or more: embedding 128, hidden 256, layers 0"),
        ({"vocabulary": 0}, "vocabulary is 0, expected at least 5"),
        ({"target_vocabulary": 3}, "target_vocabulary is 3, expected at least 5"),
        ({"dropout": -0.1}, "dropout is -0.1"),
    ],
)
def test_impossible_configurations_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Seq2SeqConfig(**settings)


def test_the_attention_decoder_traces_a_step_with_any_batch_and_source_length() -> None:
    class Step(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, tokens: Tensor, memory: tuple, state: tuple) -> tuple:
            return self.network.decode(tokens, memory, state)

    network = build("seq2seq-attention")
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    dims = ({0: batch}, ({0: batch, 1: length},) * 3, ({1: batch},))
    with torch.no_grad():
        traced = torch.export.export(Step(network), (TARGET[:, :1], *network.encode(SOURCE)), dynamic_shapes=dims).module()
        for source in (torch.tensor([[5, 2, 0], [6, 7, 2]]), SOURCE.repeat(2, 1).roll(1, 0), torch.tensor([[5] * 9])):
            tokens = torch.randint(4, 11, (len(source), 1))
            feeds = (tokens, *network.encode(source))
            torch.testing.assert_close(traced(*feeds), network.decode(*feeds))
