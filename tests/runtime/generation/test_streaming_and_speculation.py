"""Laws of decoding: streaming = generate, and speculation = plain decoding, over every network they apply to and every
precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from runtime.errors import OptionError
from runtime.generation.decoder import Decoder
from runtime.generation.rows import Rows
from runtime.generation.speculate import Speculator, Verdict
from runtime.text import BOS, EOS, SPECIALS, UNK, Tokenizer, byte_symbols

from .conftest import Make
from .networks import FIRST_LETTER, ROOM, VOCABULARY, Tiny, attends, generating, prompts, some_of
from .quantized import PRECISIONS

every_precision = pytest.mark.parametrize("precision", PRECISIONS)
with_a_cache = some_of([case for case in generating() if attends(case[0])])
with_a_hidden_state = some_of([case for case in generating() if not attends(case[0])])


@every_precision
@pytest.mark.parametrize(
    "options",
    [{}, {"beams": 3}, {"stop": ["ae", "b"]}, {"beams": 3, "stop": ["ad", "eb", "cc"]}, {"temperature": 3.0, "seed": 3}],
    ids=str,
)
def test_streaming_equals_generate(tiny: Tiny, options: dict[str, Any]) -> None:
    several = 0
    for number, prompt in enumerate(prompts(8, seed=11)):
        options = options | ({"seed": number} if "seed" in options else {}) | {"min_new_tokens": number}
        expected = tiny.model.generate(prompt, max_new_tokens=ROOM, **options)
        pieces = list(tiny.model.stream(prompt, max_new_tokens=ROOM, **options))
        assert "".join(pieces) == expected.text
        assert all(pieces)
        several += len(pieces) > 1
    assert several or options.get("beams"), "text comes as it becomes final, not at the end"


# Characters of several bytes. With byte pairs a character may come in several tokens.

_SYMBOLS = byte_symbols()
_MERGED = (_SYMBOLS[0xE6] + _SYMBOLS[0x97], _SYMBOLS[0xE6] + _SYMBOLS[0x97] + _SYMBOLS[0xA5])  # most of 日, and all of it
BYTES = Tokenizer(
    "bpe",
    (*SPECIALS, *_SYMBOLS, *_MERGED),
    merges=((_SYMBOLS[0xE6], _SYMBOLS[0x97]), (_MERGED[0], _SYMBOLS[0xA5])),
)
TEXT = "naïve 日本語 🎉 é"


@pytest.fixture(scope="module")
def bytewise(tiny_network: Make) -> Tiny:
    return tiny_network("gru", "portable", BYTES)


class Saying:
    """A constraint that leaves one text."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = [*tokens, EOS]

    def __call__(self, generated: Sequence[int]) -> list[int]:
        return [self.tokens[len(generated)]]


@pytest.mark.parametrize("beams", [1, 3])
def test_characters_of_several_bytes_are_streamed_whole(bytewise: Tiny, beams: int) -> None:
    tokens = BYTES.encode(TEXT)
    assert len(tokens) > len(TEXT)
    pieces = list(bytewise.model.stream("ab", constraint=Saying(tokens), beams=beams, max_new_tokens=60))
    assert "".join(pieces) == TEXT
    assert all(piece and "\ufffd" not in piece for piece in pieces)
    assert len(pieces) == len(TEXT)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("stop", "kept"), [("本語", "naïve 日"), ("🎉", "naïve 日本語 "), ("ïv", "na"), (" é", "naïve 日本語 🎉")]
)
def test_a_stop_text_of_several_bytes_is_cut_off(bytewise: Tiny, beams: int, stop: str, kept: str) -> None:
    options: dict[str, Any] = {"constraint": Saying(BYTES.encode(TEXT)), "stop": ["zz", stop], "beams": beams}
    found = bytewise.model.generate("ab", max_new_tokens=60, **options)
    assert (found.text, found.finish) == (kept, "stop")
    assert "".join(bytewise.model.stream("ab", max_new_tokens=60, **options)) == kept


def test_a_stop_text_is_found_though_special_tokens_lie_within(bytewise: Tiny) -> None:
    tokens = [token for number in BYTES.encode("xyz本w") for token in (number, BOS, UNK, BOS, BOS)]
    for stop, kept in (("yz", "x"), ("z本", "xy")):
        options: dict[str, Any] = {"constraint": Saying(tokens), "stop": [stop], "max_new_tokens": 60}
        assert bytewise.model.generate("ab", **options).text == kept
        assert "".join(bytewise.model.stream("ab", **options)) == kept


@pytest.mark.parametrize(
    "options", [{}, {"beams": 4}, {"temperature": 1.0}, {"temperature": 1.0, "stop": ["\ufffd\ufffd"]}], ids=str
)
def test_bytes_that_are_no_text_are_streamed_as_they_are_generated(bytewise: Tiny, options: dict[str, Any]) -> None:
    for seed, prompt in enumerate(("a", "日", "hello", "é é", "🎉")):
        given = options | ({"seed": seed} if "temperature" in options else {}) | {"max_new_tokens": 40, "min_new_tokens": 30}
        expected = bytewise.model.generate(prompt, **given).text
        assert "\ufffd" in expected or "stop" in options or "beams" in options
        assert "".join(bytewise.model.stream(prompt, **given)) == expected


def test_a_stream_is_one_text(tiny_network: Make) -> None:
    with pytest.raises(OptionError, match="a stream is one text and n_best is 2; use generate for several"):
        tiny_network("gru", "portable").model.stream("ab", beams=2, n_best=2)


# Speculation


class Watched:
    """What became of guesses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verdicts: list[tuple[int, Verdict]] = []
        judge = Speculator._judge_guesses

        def watched(speculator: Speculator, logits: Any, guesses: Sequence[int], take: Any) -> Verdict:
            verdict = judge(speculator, logits, guesses, take)
            self.verdicts.append((len(guesses), verdict))
            return verdict

        monkeypatch.setattr(Speculator, "_judge_guesses", watched)
        monkeypatch.setattr(Speculator, "_costs_more", lambda speculator: False)  # which depends on the clock


@every_precision
@with_a_cache
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2, "min_new_tokens": 12}, {"stop": ["aa", "ec"]}], ids=str)
def test_speculation_equals_plain_decoding(tiny: Tiny, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    some = [prompt * 4 for prompt in prompts(10, seed=12)]
    for prompt in some:
        plain = tiny.model.generate(prompt, max_new_tokens=24, **options)
        tiny.assert_same(tiny.model.generate(prompt, max_new_tokens=24, speculate=True, **options), plain)
        assert "".join(tiny.model.stream(prompt, max_new_tokens=24, speculate=True, **options)) == plain.text
    assert watched.verdicts, "guesses must have been verified"


@every_precision
@with_a_hidden_state
def test_a_hidden_state_cannot_take_guesses_back_and_is_decoded_plainly(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for prompt in [prompt * 4 for prompt in prompts(4, seed=12)]:
        plain = tiny.model.generate(prompt, max_new_tokens=24)
        tiny.assert_same(tiny.model.generate(prompt, max_new_tokens=24, speculate=True), plain)
    assert not watched.verdicts


@every_precision
@with_a_cache
@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram": 3}, {"alternatives": 2}], ids=str)
def test_right_and_wrong_guesses_give_what_plain_decoding_gives(
    tiny: Tiny, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses that know the answer, and are wrong at random places."""
    watched = Watched(monkeypatch)
    random = np.random.default_rng(1)
    answer: list[int] = []

    def guesses(speculator: Speculator, rows: Rows) -> list[int]:
        done = len(speculator.search.stable())
        count = min(int(random.integers(0, 7)), rows.capacity - int(rows.lengths[0]) - 1, speculator.request.room - done)
        known = answer[done : done + count]
        return [token if random.random() < 0.8 else int(random.integers(FIRST_LETTER, VOCABULARY)) for token in known]

    monkeypatch.setattr(Speculator, "guesses", guesses)
    for prompt in prompts(16, seed=12):
        plain = tiny.model.generate(prompt, max_new_tokens=16, **options)
        answer[:] = [*plain.tokens, *([EOS] if plain.finish == "eos" else []), FIRST_LETTER]
        found = tiny.model.generate(prompt, max_new_tokens=16, speculate=True, **options)
        tiny.assert_same(found, plain)
        assert [[token for token, _ in step] for step in found.alternatives] == [
            [token for token, _ in step] for step in plain.alternatives
        ]
    assert sum(verdict.right for _, verdict in watched.verdicts) > 5
    assert any(verdict.instead is not None for _, verdict in watched.verdicts)
    assert any(verdict.ended for _, verdict in watched.verdicts)


@with_a_cache
def test_speculation_decides_close_calls_by_a_plain_step(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if logits were so noisy that no lead is large enough."""
    watched = Watched(monkeypatch)
    made = Speculator.__init__

    def noisy(speculator: Speculator, decoder: Decoder, *others: Any) -> None:
        made(speculator, decoder, *others)
        speculator.margin = 1.0

    monkeypatch.setattr(Speculator, "__init__", noisy)
    for prompt in [prompt * 4 for prompt in prompts(8, seed=13)]:
        plain = tiny.model.generate(prompt, max_new_tokens=20)
        tiny.assert_same(tiny.model.generate(prompt, max_new_tokens=20, speculate=True), plain)
    assert any(verdict.close for _, verdict in watched.verdicts)
