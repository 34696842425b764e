"""Recurrent layers against their equations and against torch.nn; the networks made of them against their protocols."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from architectures.architecture import DataFacts
from architectures.catalog import find
from architectures.layers.recurrent import CELLS, LAYERS, STEPS, Recurrent, lengths_of, reverse, state_parts
from architectures.recurrent import RecurrentConfig
from runtime.errors import OptionError

KINDS = ("rnn", "gru", "lstm")
LENGTHS = torch.tensor([4, 6, 1, 3])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random_state(kind: str, *shape: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape) for _ in range(state_parts(kind)))


def torch_twin(ours: Recurrent) -> nn.RNNBase:
    """torch.nn's own stack with the weights of `ours`."""
    first = ours.layers[0][0]
    twin = LAYERS[ours.kind](
        first.input_size, ours.hidden, num_layers=len(ours.layers), bidirectional=ours.directions == 2, batch_first=True
    )
    weights = {}
    for number, directions in enumerate(ours.layers):
        for suffix, layer in zip(("", "_reverse"), directions, strict=False):
            weights |= {
                f"{name.removesuffix('0')}{number}{suffix}": value.detach().clone() for name, value in layer.named_parameters()
            }
    twin.load_state_dict(weights)
    return twin


def run_twin(twin: nn.RNNBase, x: object, state: tuple[Tensor, ...]) -> tuple[object, tuple[Tensor, ...]]:
    output, after = twin(x, state if len(state) == 2 else state[0])
    return output, after if isinstance(after, tuple) else (after,)


def ragged_tokens(lengths: Tensor, vocabulary: int = 12) -> Tensor:
    steps = torch.arange(int(lengths.max()))
    return torch.where(steps < lengths[:, None], torch.randint(4, vocabulary, (len(lengths), len(steps))), 0)


def gates_by_hand(kind: str, x: np.ndarray, h: np.ndarray, c: np.ndarray, w: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The equations of the three cells, one gate at a time."""
    size = len(h)

    def sigmoid(value: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-value))

    def gate(index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * size, (index + 1) * size)
        return w["weight_ih"][rows] @ x + w["bias_ih"][rows], w["weight_hh"][rows] @ h + w["bias_hh"][rows]

    if kind == "rnn":
        return [np.tanh(sum(gate(0)))]
    if kind == "gru":
        r, z = sigmoid(sum(gate(0))), sigmoid(sum(gate(1)))
        n = np.tanh(gate(2)[0] + r * gate(2)[1])
        return [(1 - z) * n + z * h]
    i, f, g, o = sigmoid(sum(gate(0))), sigmoid(sum(gate(1))), np.tanh(sum(gate(2))), sigmoid(sum(gate(3)))
    after = f * c + i * g
    return [o * np.tanh(after), after]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_cells_equations(kind: str) -> None:
    cell = CELLS[kind](3, 5).double()
    x, state = torch.randn(2, 3, dtype=torch.double), tuple(part.double() for part in random_state(kind, 2, 5))
    actual = STEPS[kind](x @ cell.weight_ih.T + cell.bias_ih, state, cell.weight_hh, cell.bias_hh)
    weights = {name: value.detach().numpy() for name, value in cell.named_parameters()}
    for row in range(2):
        expected = gates_by_hand(kind, x[row].numpy(), state[0][row].numpy(), state[-1][row].numpy(), weights)
        for ours, theirs in zip(actual, expected, strict=True):
            np.testing.assert_allclose(ours[row].detach().numpy(), theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_its_step_in_a_loop(kind: str) -> None:
    ours = Recurrent(kind=kind, input_size=3, hidden=5).double()
    x, state = torch.randn(2, 7, 3, dtype=torch.double), tuple(part.double() for part in random_state(kind, 1, 2, 5))
    outputs, after = ours(x, state)
    w_i, w_h, b_i, b_h = ours.layers[0][0].parameters()
    looped, tops = tuple(part[0] for part in state), []
    for step in range(7):
        looped = STEPS[kind](x[:, step] @ w_i.T + b_i, looped, w_h, b_h)
        tops.append(looped[0])
    torch.testing.assert_close(outputs, torch.stack(tops, dim=1), rtol=1e-12, atol=1e-14)
    for ours_part, part in zip(after, looped, strict=True):
        torch.testing.assert_close(ours_part[0], part, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_equals_torch_nn(kind: str, bidirectional: bool) -> None:
    ours = Recurrent(kind=kind, input_size=3, hidden=5, layers=3, bidirectional=bidirectional)
    x, state = torch.randn(4, 6, 3), random_state(kind, 3 * ours.directions, 4, 5)
    outputs, after = ours(x, state)
    expected, expected_after = run_twin(torch_twin(ours), x, state)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(after, expected_after)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_and_their_gradients_equal_a_packed_sequence(kind: str, bidirectional: bool) -> None:
    ours = Recurrent(kind=kind, input_size=3, hidden=5, layers=2, bidirectional=bidirectional).double()
    twin = torch_twin(ours).double()
    x = torch.randn(4, 6, 3, dtype=torch.double, requires_grad=True)
    state = tuple(part.double() for part in random_state(kind, 2 * ours.directions, 4, 5))
    real = (torch.arange(6) < LENGTHS[:, None]).unsqueeze(-1)

    outputs, after = ours(x, state, LENGTHS)
    packed, expected_after = run_twin(twin, pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False), state)
    expected, _ = pad_packed_sequence(packed, batch_first=True)
    torch.testing.assert_close(outputs * real, expected)
    torch.testing.assert_close(after, expected_after)

    def gradient(outputs: Tensor, after: tuple[Tensor, ...]) -> Tensor:
        weights = torch.arange(outputs.numel(), dtype=torch.double).cos().view_as(outputs)
        return torch.autograd.grad((outputs * real * weights).sum() + sum(part.square().sum() for part in after), x)[0]

    torch.testing.assert_close(gradient(outputs, after), gradient(expected, expected_after))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_lstms_memory_stands_still_through_padding_to_the_last_bit(dtype: torch.dtype) -> None:
    ours = Recurrent(kind="lstm", input_size=3, hidden=5).to(dtype)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(20)  # saturated gates are the hard case
    x, lengths = torch.randn(4, 30, 3, dtype=dtype) * 20, torch.tensor([4, 6, 1, 3])
    _, short = ours(x[:, :6], ours.initial_state(4), lengths)
    _, long = ours(x, ours.initial_state(4), lengths)
    assert torch.equal(short[1], long[1])
    assert torch.equal(short[0], long[0])


def test_reversing_within_lengths_keeps_padding_and_undoes_itself() -> None:
    x = torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]]).unsqueeze(-1)
    lengths = torch.tensor([3, 1])
    assert reverse(x, lengths).squeeze(-1).tolist() == [[3, 2, 1, 0], [4, 0, 0, 0]]
    assert torch.equal(reverse(reverse(x, lengths), lengths), x)
    assert reverse(x, None).squeeze(-1).tolist() == [[0, 3, 2, 1], [0, 0, 0, 4]]


def test_a_row_of_padding_counts_as_one_token() -> None:
    assert lengths_of(torch.tensor([[5, 6, 0], [0, 0, 0], [7, 8, 9]])).tolist() == [2, 1, 3]


def test_dropout_between_layers_acts_in_training_only() -> None:
    x = torch.randn(2, 4, 3)
    for layers, changes in ((1, False), (2, True)):
        ours = Recurrent(kind="gru", input_size=3, hidden=16, layers=layers, dropout=0.5)
        state = ours.initial_state(2)
        assert torch.equal(ours(x, state)[0], ours(x, state)[0]) is not changes
        ours.eval()
        assert torch.equal(ours(x, state)[0], ours(x, state)[0])


def test_the_initial_state_has_the_weights_precision() -> None:
    h, c = Recurrent(kind="lstm", input_size=3, hidden=5, layers=2, bidirectional=True).double().initial_state(3)
    assert h.shape == c.shape == (4, 3, 5)
    assert h.dtype == c.dtype == torch.double
    assert not h.any()
    assert not c.any()


@pytest.mark.parametrize("kind", KINDS)
def test_under_cpu_autocast_recurrent_layers_keep_full_precision(kind: str) -> None:
    ours = Recurrent(kind=kind, input_size=3, hidden=5, bidirectional=True)
    x, state = torch.randn(4, 6, 3).bfloat16(), ours.initial_state(4)
    with torch.autocast("cpu", torch.bfloat16):
        actual, after = ours(x, state, LENGTHS)
    torch.testing.assert_close((actual, after), ours(x.float(), state, LENGTHS), rtol=0, atol=0)


def language_model(kind: str, **settings: object) -> nn.Module:
    small = {"vocabulary": 12, "embedding": 6, "hidden": 5, "layers": 2}
    architecture = find(kind)
    return architecture.build(architecture.configure(small | settings)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_language_model_in_pieces_with_its_state_carried_equals_the_whole(kind: str) -> None:
    network = language_model(kind)
    tokens = torch.randint(4, 12, (3, 9))
    whole, *state = network(tokens, *network.initial_state(3))
    carried, pieces = network.initial_state(3), []
    for piece in tokens.split([4, 1, 1, 3], dim=1):
        logits, *carried = network(piece, *carried)
        pieces.append(logits)
    assert whole.shape == (3, 9, 12)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    torch.testing.assert_close(carried, state)
    torch.testing.assert_close(network(tokens)[0], whole)


@pytest.mark.parametrize("kind", KINDS)
def test_future_tokens_never_change_an_earlier_logit(kind: str) -> None:
    network = language_model(kind)
    tokens = torch.randint(4, 12, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (tokens[:, 5:] - 3) % 8 + 4
    before, after = network(tokens)[0], network(changed)[0]
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).any(dim=-1).all()


@pytest.mark.parametrize("embedding", [5, 6])
def test_a_tied_output_is_the_embedding_stored_once(embedding: int) -> None:
    network = language_model("lstm", tied=True, embedding=embedding)
    tokens = torch.randint(4, 12, (2, 4))
    h, _ = network.recurrent(network.embedding(tokens), network.initial_state(2))
    projection = torch.eye(5) if embedding == 5 else network.output.projection.weight
    nn.init.normal_(network.output.bias)
    torch.testing.assert_close(network(tokens)[0], h @ projection.T @ network.embedding.weight.T + network.output.bias)
    stored = [tensor.data_ptr() for tensor in network.state_dict().values()]
    assert len(stored) == len(set(stored))


def classifier(kind: str, **settings: object) -> nn.Module:
    return language_model(kind, task="classification", classes=3, **settings)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_classifier_sees_no_padding(kind: str, bidirectional: bool) -> None:
    network = classifier(kind, bidirectional=bidirectional)
    tokens = ragged_tokens(LENGTHS)
    logits = network(tokens)
    assert logits.shape == (4, 3)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(network(tokens[row : row + 1, :length])[0], logits[row])
    torch.testing.assert_close(network(nn.functional.pad(tokens, (0, 3))), logits)
    assert network(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bidirectional_classifier_reads_both_last_states(kind: str) -> None:
    network = classifier(kind, bidirectional=True)
    tokens = torch.randint(4, 12, (2, 5))
    embedded, twin = network.embedding(tokens), torch_twin(network.recurrent)
    outputs, _ = run_twin(twin, embedded, network.recurrent.initial_state(2))
    joined = torch.cat([outputs[:, -1, :5], outputs[:, 0, 5:]], dim=-1)  # each direction after the token it read last
    torch.testing.assert_close(network(tokens), network.output(joined))


def test_a_recurrent_network_is_fitted_to_data() -> None:
    architecture = find("gru")
    text = architecture.adapt(architecture.config, DataFacts("language-model", vocabulary=77))
    assert (text.task, text.kind, text.vocabulary) == ("language-model", "gru", 77)
    labelled = architecture.adapt(architecture.config, DataFacts("classification", outputs=7, vocabulary=50))
    assert (labelled.task, labelled.vocabulary, labelled.classes) == ("classification", 50, 7)
    assert architecture.build(labelled)(torch.full((2, 3), 49)).shape == (2, 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bidirectional": True}, "a language model cannot be bidirectional"),
        ({"kind": "gruu"}, "kind is 'gruu', expected one of: rnn, gru, lstm"),
        ({"task": "seq2seq"}, "task is 'seq2seq', but recurrent networks do: language-model, classification"),
        ({"task": "classification", "classes": 1}, "classes is 1, expected 2 or more"),
        ({"task": "classification", "tied": True}, "unset tied"),
        ({"hidden": 0}, "sizes must be 1 or more: embedding 128, hidden 0, layers 1"),
        ({"vocabulary": 4}, "vocabulary is 4, expected at least 5"),
        ({"dropout": 1.0}, "dropout is 1.0, expected 0 or more and below 1"),
    ],
)
def test_contradictory_configurations_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        RecurrentConfig(**settings)
