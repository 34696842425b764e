"""Random combinations of all options: either refused with a reason, or the text ends, keeps every rule, and comes again."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.bundle import ALIGNMENT
from runtime.errors import EdgekitError, GenerationError
from runtime.generation.constraints import Trie
from runtime.generation.options import EARLY_STOPPING, Generation, Options
from runtime.text import BOS, EOS
from tests.aligned_networks import attention_of_text

from .conftest import Make
from .networks import FIRST_LETTER, LETTERS, POSITIONS, TOKENIZER, VOCABULARY, Tiny

letters = st.integers(FIRST_LETTER, VOCABULARY - 1)
words = st.lists(st.lists(letters, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6)
texts = st.text(LETTERS, min_size=1, max_size=3)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.integers(1, 14),
    "min_new_tokens": st.integers(0, 6),
    "beams": st.integers(1, 5),
    "temperature": st.sampled_from([0.0, 1e-40, 0.3, 1.0, 5.0]),
    "top_k": st.none() | st.integers(1, 12),
    "top_p": st.none() | st.floats(0.01, 1.0),
    "min_p": st.none() | st.floats(0.0, 1.0),
    "seed": st.none() | st.integers(0, 1000),
    "n_best": st.integers(1, 4),
    "length_penalty": st.sampled_from([-1.0, 0.0, 0.6, 1.0, 3.0]),
    "coverage_penalty": st.sampled_from([0.0, 0.0, 0.0, 0.5]),
    "early_stopping": st.sampled_from(EARLY_STOPPING),
    "patience": st.sampled_from([0.5, 1.0, 2.0]),
    "groups": st.integers(1, 3),
    "diversity": st.sampled_from([0.0, 0.5, 100.0]),
    "prefix": st.lists(letters, max_size=4) | st.text(LETTERS, max_size=3),
    "repetition_penalty": st.sampled_from([0.8, 1.0, 1.5]),
    "presence_penalty": st.sampled_from([0.0, 0.5, -0.5]),
    "frequency_penalty": st.sampled_from([0.0, 0.5, -0.5]),
    "no_repeat_ngram": st.integers(0, 3),
    "bad_words": st.lists(texts | st.lists(letters, min_size=1, max_size=2), max_size=3),
    "stop": st.lists(texts, max_size=2),
    "stop_tokens": st.lists(letters, max_size=2),
    "constraint": st.none() | words,
    "alternatives": st.integers(0, 3),
    "attention": st.sampled_from([False, False, False, True]),
    "speculate": st.booleans(),
}
UNUSUAL = ("coverage_penalty", "attention", "constraint", "speculate", "patience")  # most often left out, as they refuse a lot


@st.composite
def option_sets(draw: st.DrawFn) -> dict[str, Any]:
    """Some of the options at random; half of the time those of one strategy, so that not all are refused."""
    names = draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=9))
    if draw(st.booleans()):
        names -= {*UNUSUAL, *draw(st.sampled_from([BEAMS, DRAWING]))}
    given_options = {name: draw(VALUES[name]) for name in sorted(names)}
    if draw(st.integers(0, 3)) and given_options.get("temperature", 0) == 0:
        for name in ("top_k", "top_p", "min_p", "seed"):
            given_options.pop(name, None)
    return given_options


BEAMS = {"beams", "early_stopping", "groups", "diversity", "patience"}
DRAWING = {"temperature", "top_k", "top_p", "min_p", "seed"}
prompts = st.lists(letters, min_size=1, max_size=8)
HANDS_OUT_A_FIX = (
    "expected", "lower", "raise", "set ", "needs", "choose", "leave", "relax", "loosen", "use ", "write", "allow", "are for",
    "make the bundle",
)  # fmt: skip


NETWORKS: dict[str, dict[str, Any]] = {
    "gpt": {"profile": "onnxruntime"},
    "seq2seq-attention": {"profile": "portable"},
    "seq2seq-attention with its attention": {"profile": "portable", "attention": True},
    "transformer with its attention": {"profile": "onnxruntime", "attention": True},
}


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest, tiny_network: Make) -> Tiny:
    return tiny_network(request.param.split()[0], **NETWORKS[request.param])


def test_every_option_is_tried() -> None:
    assert set(VALUES) == {item.name for item in fields(Options)}


def test_any_options_are_refused_with_a_fix_or_kept(network: Tiny) -> None:
    looks_at_sources = ALIGNMENT in network.model.sessions
    kept: Counter[str] = Counter()

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(prompt=prompts, options=option_sets(), looks=st.sampled_from(["", "attention", "coverage_penalty"]))
    def any_options(prompt: list[int], options: dict[str, Any], looks: str) -> None:
        if looks and looks_at_sources:
            options |= {looks: 0.5, "beams": options.get("beams", 1) + 1} if looks == "coverage_penalty" else {looks: True}
        if refused_or_kept(network, prompt, options):
            kept.update(name for name, value in options.items() if value)

    any_options()
    assert (kept["attention"] >= 20 and kept["coverage_penalty"] >= 20) if looks_at_sources else not kept["attention"]


def refused_or_kept(network: Tiny, prompt: list[int], options: dict[str, Any]) -> bool:
    """False: refused."""
    given_options = options | {"max_new_tokens": options.get("max_new_tokens", 12)}
    allowed = options.get("constraint")
    if allowed is not None:
        ending = [EOS, *options.get("stop_tokens", ())]
        try:
            given_options["constraint"] = Trie(allowed, ending=ending)
        except EdgekitError as error:
            assert_helps(error)
            return False
    try:
        found = network.model.generate(prompt, **given_options)
    except EdgekitError as error:
        assert_helps(error)
        if isinstance(error, GenerationError):
            assert {"constraint", "bad_words", "no_repeat_ngram", "prefix"} & options.keys(), f"nothing was forbidden: {error}"
        return False
    results = found if isinstance(found, list) else [found]
    assert isinstance(found, list) == (options.get("n_best", 1) > 1)
    assert 1 <= len(results) <= options.get("n_best", 1)
    for result in results:
        assert_keeps(network, prompt, given_options, allowed, result)
    if options.get("temperature", 0) == 0 or options.get("seed") is not None:
        again = network.model.generate(prompt, **given_options)
        together = network.model.generate([prompt[::-1], prompt], **given_options)[1]
        for other in (again, together):
            listed = other if isinstance(other, list) else [other]
            assert [(item.tokens, item.text, item.finish) for item in listed] == [
                (item.tokens, item.text, item.finish) for item in results
            ]
    if len(results) == 1 and options.get("seed") is not None:
        assert "".join(network.model.stream(prompt, **given_options)) == results[0].text
    return True


def assert_helps(error: EdgekitError) -> None:
    text = str(error)
    assert any(part in text for part in HANDS_OUT_A_FIX), text
    assert "\n" not in text


def assert_keeps(
    network: Tiny, prompt: list[int], options: dict[str, Any], allowed: list[tuple[int, ...]] | None, found: Generation
) -> None:
    """Every rule that the options state."""
    tokens = list(found.tokens)
    ending = {EOS, *options.get("stop_tokens", ())}
    assert all(0 <= token < VOCABULARY for token in tokens)
    assert len(tokens) == len(found.token_logprobs)
    assert len(tokens) + len(prompt) <= POSITIONS or not network.is_language_model
    prefix = options.get("prefix", ())
    forced = TOKENIZER.encode(prefix) if isinstance(prefix, str) else list(prefix)
    assert tokens[: len(forced)] == forced
    assert_finish(options, found, ending, len(forced))
    if found.finish == "eos" or (found.finish == "stop" and not options.get("stop")):
        assert len(tokens) >= options.get("min_new_tokens", 0)
    banned = [tuple(TOKENIZER.encode(word)) if isinstance(word, str) else tuple(word) for word in options.get("bad_words", ())]
    before = prompt if network.is_language_model else [1]
    everything = [*before, *tokens]
    free = len(before) + len(forced)  # what was given is not the search's to keep clean
    for word in banned:
        for end in range(free + 1, len(everything) + 1):
            assert len(word) > end or tuple(everything[end - len(word) : end]) != word
    if size := options.get("no_repeat_ngram", 0):
        for end in range(max(free + 1, size), len(everything) + 1):
            run = everything[end - size : end]
            assert all(everything[place : place + size] != run for place in range(end - size))
    if allowed is not None and found.finish != "length":
        assert not options.get("stop") or any(list(word[: len(tokens)]) == tokens for word in allowed)
        assert options.get("stop") or tuple(tokens) in allowed
    elif allowed is not None:
        assert any(list(word[: len(tokens)]) == tokens for word in allowed)
    if options.get("attention"):
        assert found.attention is not None
        assert found.attention.shape == (len(tokens), len(prompt))
        expected = attention_of_text(network.about.network, prompt, [BOS, *tokens])[: len(tokens)]
        np.testing.assert_allclose(found.attention, expected, atol=1e-5)
    else:
        assert found.attention is None
    wanted = options.get("alternatives", 0)
    assert [len(step) for step in found.alternatives] == ([wanted] * len(tokens) if wanted else [])
    for step in found.alternatives:
        assert [score for _, score in step] == sorted((score for _, score in step), reverse=True)


def assert_finish(options: dict[str, Any], found: Generation, ending: set[int], forced: int) -> None:
    tokens = found.tokens
    assert found.finish in ("eos", "stop", "length")
    assert len(tokens) <= options["max_new_tokens"]
    assert not ending & set(tokens[forced:])
    whole = TOKENIZER.decode(tokens)
    stops = options.get("stop", ())
    if found.finish == "length":
        assert len(tokens) == options["max_new_tokens"]
        assert found.text == whole
    elif found.finish == "eos":
        assert len(tokens) < options["max_new_tokens"]
        assert found.text == whole
    else:
        by_text = [stop for stop in stops if stop in whole]
        assert options.get("stop_tokens") or by_text
        assert found.text == whole or any(whole.startswith(found.text + stop) for stop in by_text)
    if not forced:
        assert not any(stop in found.text for stop in stops)
