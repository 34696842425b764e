"""The Transformer against torch.nn's and Hugging Face's, and what must hold of any decoder with a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from architectures.architecture import DataFacts
from architectures.catalog import find
from architectures.layers.attention import MultiHeadAttention, collect_attention
from architectures.layers.blocks import CrossAttentionBlock, SelfAttentionBlock
from architectures.layers.positions import sinusoidal_table
from architectures.transformer import Transformer, TransformerConfig
from runtime.errors import OptionError, UnknownName

TINY = TransformerConfig(
    vocabulary=13, target_vocabulary=11, width=12, heads=3, encoder_layers=2, decoder_layers=2, feedforward=16, max_positions=20
)
VARIANTS = {
    "pre": TINY,
    "post": replace(TINY, norm="post"),
    "learned": replace(TINY, positions="learned", position_offset=2, embedding_norm=True, activation="gelu"),
    "untied": replace(TINY, tied_output=False, output_bias=True, scaled_embeddings=False),
    "shared": replace(TINY, target_vocabulary=13, shared_embeddings=True),
}


def build(config: TransformerConfig, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(config).eval()


def some_tokens(rows: int, time: int, vocabulary: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(4, vocabulary, (rows, time), generator=torch.Generator().manual_seed(seed))


def copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    weights = theirs.in_proj_weight.chunk(3)
    biases = theirs.in_proj_bias.chunk(3)
    for linear, weight, bias in zip((ours.query, ours.key, ours.value), weights, biases, strict=True):
        linear.load_state_dict({"weight": weight, "bias": bias})
    ours.output.load_state_dict(theirs.out_proj.state_dict())


def copy_layer(ours: nn.Module, theirs: nn.Module) -> None:
    """From torch.nn's encoder or decoder layer, whose norms and biases we make non-trivial first."""
    for name, parameter in theirs.named_parameters():
        if "bias" in name or "norm" in name:
            nn.init.normal_(parameter, mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.3)
    copy_attention(ours.attention, theirs.self_attn)
    sublayers = [ours.attention_sublayer, ours.feedforward_sublayer]
    if isinstance(ours, CrossAttentionBlock):
        copy_attention(ours.cross_attention, theirs.multihead_attn)
        sublayers.insert(1, ours.cross_sublayer)
    ours.feedforward.expand.load_state_dict(theirs.linear1.state_dict())
    ours.feedforward.contract.load_state_dict(theirs.linear2.state_dict())
    for index, sublayer in enumerate(sublayers):
        sublayer.norm.load_state_dict(getattr(theirs, f"norm{index + 1}").state_dict())


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_it_equals_the_transformer_of_torch(norm: str, activation: str) -> None:
    config = replace(TINY, norm=norm, activation=activation)
    ours = build(config)
    about = {"dim_feedforward": 16, "activation": activation, "batch_first": True, "norm_first": norm == "pre", "dropout": 0.0}
    last = nn.LayerNorm(12) if norm == "pre" else None
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, **about), 2, norm=last, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 3, **about), 2, norm=last)
    for mine, other in [*zip(ours.encoder, encoder.layers, strict=True), *zip(ours.decoder, decoder.layers, strict=True)]:
        copy_layer(mine, other)
    if last is not None:
        nn.init.normal_(last.weight)
        ours.encoder_norm.load_state_dict(last.state_dict())
        ours.decoder_norm.load_state_dict(last.state_dict())
    source, tokens = some_tokens(2, 6), some_tokens(2, 5, seed=2)
    source[1, 4:] = 0
    table = sinusoidal_table(20, 12)
    x = ours.source_embedding(source) * 12**0.5 + table[:6]
    y = ours.target_embedding(tokens) * 12**0.5 + table[:5]
    encoder.train()  # torch's fast path, which only evaluation takes, treats padding differently
    memory = encoder(x, src_key_padding_mask=source == 0)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    hidden = decoder(y, memory, tgt_mask=causal, memory_key_padding_mask=source == 0)
    torch.testing.assert_close(ours(source, tokens), hidden @ ours.target_embedding.weight.T, rtol=1e-4, atol=1e-5)


def bart_weights(theirs: nn.Module) -> dict[str, Tensor]:
    """BART's of Hugging Face, by our names."""
    renamed = {"final_logits_bias": "output.bias", "model.shared.weight": "source_embedding.weight"}
    parts = {
        "model.encoder.layers": "encoder",
        "model.decoder.layers": "decoder",
        "model.encoder": "source_placement",
        "model.decoder": "target_placement",
        "embed_positions": "positions.table",
        "layernorm_embedding": "norm",
        "self_attn_layer_norm": "attention_sublayer.norm",
        "encoder_attn_layer_norm": "cross_sublayer.norm",
        "final_layer_norm": "feedforward_sublayer.norm",
        "self_attn": "attention",
        "encoder_attn": "cross_attention",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "out_proj": "output",
        "fc1": "feedforward.expand",
        "fc2": "feedforward.contract",
    }
    weights = {}
    for name, tensor in theirs.state_dict().items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            continue
        new = renamed.get(name, name)
        for theirs_part, ours_part in parts.items():
            new = new.replace(theirs_part, ours_part)
        weights[new] = tensor.flatten() if name == "final_logits_bias" else tensor
    return weights


def test_it_equals_bart_of_hugging_face() -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    theirs = BartForConditionalGeneration(
        BartConfig(
            vocab_size=13,
            d_model=12,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=3,
            decoder_attention_heads=3,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_position_embeddings=20,
            activation_function="gelu",
            scale_embedding=True,
            pad_token_id=0,
            init_std=0.3,
        )
    ).eval()
    nn.init.normal_(theirs.final_logits_bias)
    config = replace(VARIANTS["learned"], target_vocabulary=13, shared_embeddings=True, norm="post", output_bias=True)
    ours = build(config)
    ours.load_state_dict(bart_weights(theirs))
    source, tokens = some_tokens(2, 6), some_tokens(2, 5, seed=2)
    source[1, 4:] = 0
    expected = theirs(input_ids=source, attention_mask=source != 0, decoder_input_ids=tokens).logits
    torch.testing.assert_close(ours(source, tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_later_token_never_changes_an_earlier_logit(name: str) -> None:
    network = build(VARIANTS[name])
    source, tokens = some_tokens(2, 6), some_tokens(2, 7, seed=2)
    before = network(source, tokens)
    for place in range(1, 7):
        changed = tokens.clone()
        changed[:, place] = (tokens[:, place] + 1) % 7 + 4
        after = network(source, changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(after[:, place], before[:, place])


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_never_changes_a_real_position(name: str, side: str) -> None:
    network = build(VARIANTS[name])
    source, tokens = some_tokens(2, 6), some_tokens(2, 5, seed=2)
    expected = network(source, tokens)
    amounts = (3, 0) if side == "left" else (0, 3)
    wider_source = nn.functional.pad(source, amounts)
    wider_tokens = nn.functional.pad(tokens, amounts)
    actual = network(wider_source, wider_tokens)[:, amounts[0] : amounts[0] + 5]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("pieces", [(1,) * 7, (3, 1, 3), (2, 5)])
def test_decoding_in_pieces_equals_decoding_at_once(name: str, pieces: tuple[int, ...]) -> None:
    network = build(VARIANTS[name])
    source, tokens = some_tokens(3, 6), some_tokens(3, 7, seed=2)
    source[0, 3:] = 0
    tokens[1, :2] = 0  # left padding, as in batched generation
    memory, state = network.encode(source)
    logits = []
    for piece in tokens.split(pieces, dim=1):
        part, state = network.decode(piece, memory, state)
        logits.append(part)
    torch.testing.assert_close(torch.cat(logits, dim=1), network(source, tokens), rtol=1e-5, atol=1e-5)
    assert [tensor.shape[0] for tensor in state] == [3] * 5
    assert state[0].tolist() == (tokens != 0).tolist()


def test_without_a_padding_token_every_token_counts() -> None:
    network, tokens = build(replace(TINY, pad=-1)), some_tokens(1, 4)
    zero_in_front = nn.functional.pad(tokens, (1, 0))
    assert not torch.allclose(network(tokens, zero_in_front)[:, 1:], network(tokens, tokens))


def test_rows_of_padding_give_finite_numbers_and_gradients() -> None:
    network = build(TINY)
    source, tokens = some_tokens(2, 6), some_tokens(2, 5)
    source[0], tokens[0] = 0, 0
    logits = network(source, tokens)
    assert logits.isfinite().all()
    logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in network.parameters())


def test_every_attention_of_the_network_can_be_looked_at() -> None:
    network = build(TINY)
    source, tokens = some_tokens(2, 6), some_tokens(2, 5, seed=2)
    source[1, 4:] = 0
    expected = network(source, tokens)
    with collect_attention(network) as weights:
        actual = network(source, tokens)
    assert torch.equal(actual, expected)
    kinds = ("encoder.{}.attention", "decoder.{}.attention", "decoder.{}.cross_attention")
    assert set(weights) == {kind.format(layer) for kind in kinds for layer in (0, 1)}
    (cross,) = weights["decoder.1.cross_attention"]
    assert cross.shape == (2, 3, 5, 6)
    torch.testing.assert_close(cross.sum(-1), torch.ones(2, 3, 5))
    assert (cross[1, ..., 4:] == 0).all()
    network(source, tokens)
    assert len(weights["decoder.1.cross_attention"]) == 1


def test_it_trains_in_lower_precision() -> None:
    network = build(TINY).train()
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(some_tokens(2, 6), some_tokens(2, 5))
    logits.float().square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in network.parameters())


def test_the_papers_sizes() -> None:
    """The paper rounds to 65 and 213 million; these are its layers, counted, with one embedding of 37,000 tokens."""

    def layer(width: int, hidden: int, attentions: int) -> int:
        norms = (attentions + 1) * 2 * width
        return attentions * 4 * (width * width + width) + 2 * width * hidden + hidden + width + norms

    for name, width, hidden in (("transformer-base", 512, 2048), ("transformer-large", 1024, 4096)):
        assert find(name).parameters() == 37_000 * width + 6 * (layer(width, hidden, 1) + layer(width, hidden, 2))


def test_blocks_may_be_recomputed() -> None:
    blocks = [module for module in build(TINY).modules() if getattr(module, "recomputable", False)]
    assert {type(block) for block in blocks} == {SelfAttentionBlock, CrossAttentionBlock}
    assert len(blocks) == 4


def test_it_is_fitted_to_data_and_refuses_what_is_too_long() -> None:
    entry = find("transformer")
    facts = DataFacts(task="seq2seq", vocabulary=30, target_vocabulary=43, longest=25)
    config = entry.adapt(entry.config, facts)
    assert (config.vocabulary, config.target_vocabulary) == (30, 43)
    with pytest.raises(OptionError, match="has 25 tokens but positions go to 20; set network.max_positions=25"):
        entry.adapt(TINY, facts)
    with pytest.raises(OptionError, match="set network.shared_embeddings=false"):
        entry.adapt(find("transformer-base").config, facts)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"heads": 5}, OptionError, "width 256 cannot be divided into 5 heads"),
        ({"heads": 0}, OptionError, "heads is 0, expected 1 or more"),
        ({"dropout": 1.0}, OptionError, "dropout is 1.0"),
        ({"vocabulary": 0}, OptionError, "vocabulary is 0"),
        ({"decoder_layers": 0}, OptionError, "decoder_layers is 0"),
        ({"activation": "rely"}, UnknownName, "did you mean 'relu'"),
        ({"norm": "none"}, UnknownName, "known: post, pre"),
        ({"positions": "learnt"}, UnknownName, "did you mean 'learned'"),
        ({"position_offset": 2}, OptionError, "where positions=learned"),
    ],
)
def test_nonsense_is_refused(settings: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        find("transformer").configure(settings)
