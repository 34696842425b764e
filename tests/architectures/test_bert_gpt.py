"""BERT and GPT against Hugging Face's, and what must hold of padding, of the future and of carried state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures.architecture import DataFacts
from architectures.bert import BERT, BERTConfig
from architectures.catalog import find
from architectures.gpt import GPT, GPTConfig
from architectures.layers.attention import collect_attention
from runtime.errors import OptionError, UnknownName

GPT_TINY = GPTConfig(vocabulary=11, width=12, heads=3, layers=2, feedforward=16, max_positions=12)
BERT_TINY = BERTConfig(vocabulary=11, width=12, heads=3, layers=2, feedforward=16, max_positions=12, classes=5)


def build(network: Any, config: Any) -> Any:
    """With weights so large that a difference would show."""
    torch.manual_seed(0)
    module = network(config).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def some_tokens(rows: int, time: int, seed: int = 1) -> Tensor:
    return torch.randint(4, 11, (rows, time), generator=torch.Generator().manual_seed(seed))


def rename(name: str, parts: dict[str, str]) -> str:
    for old, new in parts.items():
        name = name.replace(old, new)
    return name


def gpt_weights(theirs: nn.Module) -> dict[str, Tensor]:
    """GPT-2's of Hugging Face, by our names."""
    parts = {
        "transformer.wte": "embedding",
        "transformer.wpe": "positions.table",
        "transformer.h": "layers",
        "transformer.ln_f": "norm",
        "ln_1": "attention_sublayer.norm",
        "ln_2": "feedforward_sublayer.norm",
        "mlp.c_fc": "feedforward.expand",
        "mlp.c_proj": "feedforward.contract",
        "attn.c_proj": "attention.output",
    }
    weights = {}
    for name, tensor in theirs.state_dict().items():
        linear = "attn.c" in name or "mlp.c" in name
        tensor = tensor.T if linear and tensor.dim() == 2 else tensor
        if "attn.c_attn" in name:
            for part, third in zip(("query", "key", "value"), tensor.chunk(3, dim=-1 if tensor.dim() == 1 else 0), strict=True):
                weights[rename(name, parts | {"attn.c_attn": f"attention.{part}"})] = third
        elif name != "lm_head.weight":
            weights[rename(name, parts)] = tensor
    return weights


def test_gpt_equals_gpt2_of_hugging_face() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    about = GPT2Config(vocab_size=11, n_embd=12, n_head=3, n_layer=2, n_inner=16, n_positions=12)
    theirs = build(GPT2LMHeadModel, about)
    ours = GPT(GPT_TINY).eval()
    ours.load_state_dict(gpt_weights(theirs))
    tokens = some_tokens(2, 7)
    logits, *_ = ours(tokens, *ours.initial_state(2))
    torch.testing.assert_close(logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_the_published_gpt2_sizes() -> None:
    assert find("gpt2").parameters() == 124_439_808
    sizes = [find(name).parameters() for name in ("gpt2-medium", "gpt2-large", "gpt2-xl")]
    assert sizes == [354_823_168, 774_030_080, 1_557_611_200]


def test_gpt_never_looks_ahead() -> None:
    network, tokens = build(GPT, GPT_TINY), some_tokens(2, 7)
    before, *_ = network(tokens, *network.initial_state(2))
    for place in range(1, 7):
        changed = tokens.clone()
        changed[:, place] = (tokens[:, place] + 1) % 7 + 4
        after, *_ = network(changed, *network.initial_state(2))
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(after[:, place], before[:, place])


@pytest.mark.parametrize("amounts", [(3, 0), (0, 3), (2, 2)])
def test_padding_never_changes_a_real_position_of_gpt(amounts: tuple[int, int]) -> None:
    network, tokens = build(GPT, GPT_TINY), some_tokens(2, 7)
    expected, *_ = network(tokens, *network.initial_state(2))
    actual, *_ = network(nn.functional.pad(tokens, amounts), *network.initial_state(2))
    torch.testing.assert_close(actual[:, amounts[0] : amounts[0] + 7], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pieces", [(1,) * 9, (4, 1, 1, 3), (7, 2)])
def test_gpt_in_pieces_equals_gpt_at_once(pieces: tuple[int, ...]) -> None:
    network, tokens = build(GPT, GPT_TINY), some_tokens(3, 9)
    tokens[0, :3] = 0
    whole, *last = network(tokens, *network.initial_state(3))
    state, parts = network.initial_state(3), []
    for piece in tokens.split(pieces, dim=1):
        part, *state = network(piece, *state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)
    assert all(tensor.shape[network.state_batch_axis] == 3 for tensor in state)


def test_a_full_table_of_positions_can_be_padded_but_not_exceeded() -> None:
    network, tokens = build(GPT, GPT_TINY), some_tokens(1, 12)
    network(nn.functional.pad(tokens, (2, 2)), *network.initial_state(1))
    with pytest.raises(IndexError):
        network(some_tokens(1, 13), *network.initial_state(1))


def test_gpt2s_own_vocabulary_has_no_padding_and_ours_has() -> None:
    entry = find("gpt2")
    assert entry.config.pad == -1
    adapted = entry.adapt(entry.config, DataFacts(task="language-model", vocabulary=90, longest=100))
    assert (adapted.pad, adapted.vocabulary) == (0, 90)
    with pytest.raises(OptionError, match="has 2000 tokens but positions go to 1024; set network.max_positions=2000"):
        entry.adapt(entry.config, DataFacts(task="language-model", vocabulary=90, longest=2000))


def bert_weights(theirs: nn.Module) -> dict[str, Tensor]:
    parts = {
        "bert.": "",
        "embeddings.word_embeddings": "embedding",
        "embeddings.token_type_embeddings": "segment_embedding",
        "embeddings.position_embeddings": "positions.table",
        "embeddings.LayerNorm": "embedding_norm",
        "encoder.layer": "layers",
        "attention.output.LayerNorm": "attention_sublayer.norm",
        "attention.output.dense": "attention.output",
        "attention.self.": "attention.",
        "intermediate.dense": "feedforward.expand",
        "output.LayerNorm": "feedforward_sublayer.norm",
        "pooler.dense": "pooler",
        "cls.predictions.transform.dense": "masked_words.transform",
        "cls.predictions.transform.LayerNorm": "masked_words.norm",
        "cls.predictions.bias": "masked_words.output.bias",
        "cls.seq_relationship": "next_sentence",
    }
    weights = {}
    for name, tensor in theirs.state_dict().items():
        if "decoder" not in name and "position_ids" not in name:
            new = rename(name, parts)
            weights[new if "attention.output" in new else new.replace("output.dense", "feedforward.contract")] = tensor
    return weights


def test_bert_and_its_heads_equal_those_of_hugging_face() -> None:
    from transformers import BertConfig, BertForPreTraining

    theirs = build(
        BertForPreTraining,
        BertConfig(
            vocab_size=11,
            hidden_size=12,
            num_attention_heads=3,
            num_hidden_layers=2,
            intermediate_size=16,
            max_position_embeddings=12,
        ),
    )
    ours = BERT(BERT_TINY).eval()
    ours.load_state_dict(bert_weights(theirs))
    tokens, segments = some_tokens(2, 7), torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
    tokens[1, 5:] = 0
    about = {"input_ids": tokens, "token_type_ids": segments, "attention_mask": tokens != 0}
    inner = theirs.bert(**about)
    real = tokens != 0
    hidden = ours.encode(tokens, segments)
    torch.testing.assert_close(hidden[real], inner.last_hidden_state[real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.pooler(hidden[:, 0]).tanh(), inner.pooler_output, rtol=1e-4, atol=1e-4)
    words, follows = ours(tokens, segments)
    outer = theirs(**about)
    torch.testing.assert_close(words[real], outer.prediction_logits[real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(follows, outer.seq_relationship_logits, rtol=1e-4, atol=1e-4)


def test_the_published_bert_sizes() -> None:
    """Encoder and pooler; the heads of pre-training come on top (the words' output is the embedding again)."""
    for name, count, width in (("bert-base", 109_482_240, 768), ("bert-large", 335_141_888, 1024)):
        heads = width * width + 3 * width + 30_522 + 2 * width + 2
        assert find(name).parameters() == count + heads


@pytest.mark.parametrize("task", ["masked-lm", "classification", "embedding"])
def test_padding_never_changes_berts_answer(task: str) -> None:
    network, tokens = build(BERT, replace(BERT_TINY, task=task)), some_tokens(2, 6)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    expected = network(tokens, segments)
    actual = network(nn.functional.pad(tokens, (0, 4)), nn.functional.pad(segments, (0, 4), value=1))
    if task == "masked-lm":
        torch.testing.assert_close(actual[0][:, :6], expected[0], rtol=1e-5, atol=1e-5)
        actual, expected = actual[1], expected[1]
        left = network(nn.functional.pad(tokens, (4, 0)), nn.functional.pad(segments, (4, 0)))
        torch.testing.assert_close(left[0][:, 4:], network(tokens, segments)[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_berts_embedding_is_the_normalised_mean_of_real_positions() -> None:
    network, tokens = build(BERT, replace(BERT_TINY, task="embedding")), some_tokens(2, 6)
    tokens[0, 4:] = 0
    segments = torch.zeros_like(tokens)
    hidden = network.encode(tokens, segments)
    mean = torch.stack([hidden[0, :4].mean(0), hidden[1].mean(0)])
    torch.testing.assert_close(network(tokens, segments), mean / mean.square().sum(1, keepdim=True).sqrt())


def test_the_classifier_reads_the_pooled_first_token() -> None:
    network, tokens = build(BERT, replace(BERT_TINY, task="classification")), some_tokens(2, 6)
    segments = torch.zeros_like(tokens)
    pooled = network.pooler(network.encode(tokens, segments)[:, 0]).tanh()
    logits = network(tokens, segments)
    assert logits.shape == (2, 5)
    torch.testing.assert_close(logits, network.classifier(pooled))


@pytest.mark.parametrize("task", ["masked-lm", "classification", "embedding"])
def test_every_trainable_weight_of_bert_is_trained_and_features_are_the_same(task: str) -> None:
    network = build(BERT, replace(BERT_TINY, task=task))
    tokens = some_tokens(2, 6)
    tokens[0] = 0  # a row of padding
    outputs = network(tokens, torch.zeros_like(tokens))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert all(output.isfinite().all() for output in outputs)
    sum(output.pow(3).sum() for output in outputs).backward()
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    heads = find("bert").head
    features = {name for name in network.state_dict() if not name.startswith(heads)}
    assert features == {name for name in BERT(BERT_TINY).state_dict() if not name.startswith(heads)}


def test_bert_is_fitted_to_data() -> None:
    entry = find("bert")
    facts = DataFacts(task="classification", vocabulary=90, outputs=7, longest=60)
    config = entry.adapt(entry.config, facts)
    assert (config.task, config.vocabulary, config.classes) == ("classification", 90, 7)
    with pytest.raises(OptionError, match="has 60 tokens but positions go to 12"):
        entry.adapt(BERT_TINY, facts)


def test_attention_of_gpt_can_be_looked_at_in_every_step() -> None:
    network, tokens = build(GPT, GPT_TINY), some_tokens(2, 4)
    tokens[0, 0] = 0
    state = network.initial_state(2)
    with collect_attention(network) as weights:
        for token in tokens.split(1, dim=1):
            _, *state = network(token, *state)
    assert set(weights) == {"layers.0.attention", "layers.1.attention"}
    assert [step.shape for step in weights["layers.1.attention"]] == [(2, 3, 1, keys) for keys in (1, 2, 3, 4)]
    last = weights["layers.1.attention"][-1]
    torch.testing.assert_close(last.sum(-1), torch.ones(2, 3, 1))
    assert (last[0, ..., 0] == 0).all()


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("gpt", {"heads": 5}, OptionError, "width 192 cannot be divided into 5 heads"),
        ("gpt", {"layers": 0}, OptionError, "layers is 0, expected 1 or more"),
        ("gpt", {"max_positions": 0}, OptionError, "max_positions is 0"),
        ("gpt", {"activation": "gelo"}, UnknownName, "did you mean 'gelu'"),
        ("bert", {"task": "regression"}, UnknownName, "known: classification, embedding, masked-lm"),
        ("bert", {"dropout": -0.1}, OptionError, "dropout is -0.1"),
        ("bert", {"classes": 0}, OptionError, "classes is 0"),
    ],
)
def test_nonsense_is_refused(name: str, settings: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        find(name).configure(settings)
