"""Beam search against `generate` of Hugging Face: the same weights, the same texts, the same scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exporters.exportable import Exportable
from exporters.source import find_source
from runtime.generation.options import Generation
from runtime.text import BOS, EOS, PAD
from tests.architectures.test_bert_gpt import gpt_weights
from tests.architectures.test_transformer import bart_weights

from .networks import Tiny, make_endings_likely, opened, write

VOCABULARY, WIDTH, HEADS, LAYERS, INNER, POSITIONS = 11, 16, 2, 1, 24, 40
ROOM = 9
EARLY_STOPPING = {"bound": False, "count": True, "never": "never"}  # ours and theirs
SHARED = {"vocabulary": VOCABULARY, "width": WIDTH, "heads": HEADS, "feedforward": INNER, "max_positions": POSITIONS}


def strong(module: Any, seed: int) -> Any:
    """With weights so large that every token depends on those before it."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    return module.eval()


def gpt2() -> tuple[Any, Exportable]:
    from transformers import GPT2Config, GPT2LMHeadModel

    about = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_head=HEADS, n_layer=LAYERS, n_inner=INNER, n_positions=POSITIONS,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    theirs = strong(GPT2LMHeadModel(about), 3)
    source = find_source("gpt", SHARED | {"layers": LAYERS, "pad": -1}, profile="portable")
    assert source.generator is not None
    ours = source.generator.network
    ours.load_state_dict(gpt_weights(theirs))
    make_endings_likely(source.generator, 0.2, torch.Generator().manual_seed(1))
    ours.embedding.weight.data[PAD, 0] = -60.0  # not padding to us, but to them
    theirs.transformer.wte.weight.data.copy_(ours.embedding.weight)
    theirs.transformer.ln_f.load_state_dict(ours.norm.state_dict())
    return theirs, source


def bart() -> tuple[Any, Exportable]:
    from transformers import BartConfig, BartForConditionalGeneration

    about = BartConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, max_position_embeddings=POSITIONS,
        activation_function="gelu", scale_embedding=True, bos_token_id=BOS, decoder_start_token_id=BOS, eos_token_id=EOS,
        pad_token_id=PAD, forced_eos_token_id=None, forced_bos_token_id=None,
    )  # fmt: skip
    theirs = strong(BartForConditionalGeneration(about), 5)
    settings: dict[str, Any] = SHARED | {
        "target_vocabulary": VOCABULARY, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "positions": "learned",
        "position_offset": 2, "embedding_norm": True, "activation": "gelu", "norm": "post", "shared_embeddings": True,
        "output_bias": True,
    }  # fmt: skip
    source = find_source("transformer", settings, profile="onnxruntime")
    assert source.generator is not None
    ours = source.generator.network
    ours.load_state_dict(bart_weights(theirs))
    make_endings_likely(source.generator, 0.2, torch.Generator().manual_seed(1))
    ours.output.bias.data[PAD] = -60.0  # which only they would generate
    theirs.final_logits_bias.copy_(ours.output.bias.data[None])
    return theirs, source


MAKERS: dict[str, Callable[[], tuple[Any, Exportable]]] = {"gpt2": gpt2, "bart": bart}


@pytest.fixture(scope="module", params=MAKERS)
def pair(request: pytest.FixtureRequest, shared: Callable[[str, Callable[[Path], object]], Path]) -> tuple[Any, Tiny]:
    theirs, source = MAKERS[request.param]()
    folder = shared(f"peer-{request.param}", lambda folder: write(source, folder / "x.bundle"))
    return theirs, opened(source, folder / "x.bundle")


def inputs(count: int = 4, length: int = 4) -> Tensor:
    return torch.randint(4, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(2))


def their_texts(theirs: Any, prompts: Tensor, **options: Any) -> tuple[list[list[tuple[int, ...]]], list[list[float]]]:
    """For each prompt the texts, the best first, with <eos> where they have one, and their scores."""
    with torch.inference_mode():
        found = theirs.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=ROOM,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    first = 1 if theirs.config.is_encoder_decoder else prompts.shape[1]
    texts = [text_of(row[first:].tolist()) for row in found.sequences]
    scores = getattr(found, "sequences_scores", None)
    listed = [float("nan")] * len(texts) if scores is None else scores.tolist()
    each = len(texts) // len(prompts)
    return (
        [texts[start : start + each] for start in range(0, len(texts), each)],
        [listed[start : start + each] for start in range(0, len(texts), each)],
    )


def text_of(tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens)


def with_end(found: Generation) -> tuple[int, ...]:
    return (*found.tokens, *([EOS] if found.finish == "eos" else []))


FILTERS = [(0, 0), (2, 0), (3, 4), (0, 4), (2, 2)]  # no_repeat_ngram, min_new_tokens: taken in turn
CASES = [
    (beams, length_penalty, stopping, *FILTERS[number % len(FILTERS)])
    for number, (beams, length_penalty, stopping) in enumerate(product((2, 3, 4), (0.0, 0.6, 1.0, 2.0), EARLY_STOPPING))
]


@pytest.mark.parametrize(("beams", "length_penalty", "stopping", "ngram", "least"), CASES)
def test_beam_search_equals_that_of_hugging_face(
    pair: tuple[Any, Tiny], beams: int, length_penalty: float, stopping: str, ngram: int, least: int
) -> None:
    theirs, ours = pair
    prompts = inputs()
    texts, scores = their_texts(
        theirs,
        prompts,
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=length_penalty,
        early_stopping=EARLY_STOPPING[stopping],
        no_repeat_ngram_size=ngram,
        min_new_tokens=least,
    )
    found = ours.model.generate(
        prompts.tolist(),
        beams=beams,
        n_best=beams,
        max_new_tokens=ROOM,
        length_penalty=length_penalty,
        early_stopping=stopping,
        no_repeat_ngram=ngram,
        min_new_tokens=least,
    )
    assert [[with_end(result) for result in results] for results in found] == texts
    for results, expected in zip(found, scores, strict=True):
        assert [result.score for result in results] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("ngram", "least"), FILTERS)
def test_greedy_decoding_equals_that_of_hugging_face(pair: tuple[Any, Tiny], ngram: int, least: int) -> None:
    theirs, ours = pair
    prompts = inputs(8)
    texts, _ = their_texts(theirs, prompts, num_beams=1, no_repeat_ngram_size=ngram, min_new_tokens=least)
    found = ours.model.generate(prompts.tolist(), max_new_tokens=ROOM, no_repeat_ngram=ngram, min_new_tokens=least)
    assert [[with_end(result)] for result in found] == texts


def test_there_is_something_to_compare(pair: tuple[Any, Tiny]) -> None:
    """Texts end, at different lengths, and the rules of stopping, the penalty and the bans each change the answer."""
    _, ours = pair
    prompts = inputs().tolist()

    def texts(**options: Any) -> list[list[tuple[int, ...]]]:
        found = ours.model.generate(prompts, max_new_tokens=ROOM, **{"beams": 3, "n_best": 3} | options)
        return [[with_end(result) for result in results] for results in found]

    plain = texts()
    flat = [text for group in plain for text in group]
    assert sum(text[-1] == EOS for text in flat) >= 3
    assert len({len(text) for text in flat}) >= 3
    others = ({"length_penalty": 0.0}, {"no_repeat_ngram": 2}, {"min_new_tokens": 4}, {"early_stopping": "count"})
    assert all(texts(**options) != plain for options in others)
