"""Filters: each against a plain definition, and against transformers' where both mean the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.errors import GenerationError, OptionError
from runtime.generation.filters import filters_for
from runtime.generation.numeric import log_softmax
from runtime.generation.options import Options
from runtime.text import EOS, UNK, Tokenizer, characters_of, words_of
from toolkit.data.bpe import train_bpe

Scores = NDArray[np.float32]
VOCABULARY = 40
TEXTS = [topics[name] for name in sorted(topics)[:6]]
BPE = train_bpe(TEXTS, vocabulary=600)


def random_scores(seed: int, vocabulary: int = VOCABULARY) -> Scores:
    return log_softmax(np.random.default_rng(seed).standard_normal((1, vocabulary)).astype(np.float32) * 3)[0]


def random_tokens(seed: int, length: int, vocabulary: int = VOCABULARY) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(vocabulary, size=length).tolist()
    return tokens


def refuse_to_encode(text: str) -> Sequence[int]:
    raise AssertionError(f"nothing here needs {text!r} encoded")


def filtered(
    scores: Scores,
    tokens: Sequence[int],
    start: int,
    *,
    ending: Sequence[int] = (EOS,),
    encode: Callable[[str], Sequence[int]] = refuse_to_encode,
    **options: Any,
) -> Scores:
    result = scores.copy()
    for apply in filters_for(Options(**options), ending=ending, encode=encode, vocabulary=len(scores)):
        assert apply(result, tokens, start) is None  # type: ignore[func-returns-value]
    return result


def banned(scores: Scores) -> set[int]:
    return set(np.flatnonzero(np.isneginf(scores)).tolist())


def after(tokens: Sequence[int], tokenizer: Tokenizer | None = None, start: int = 0, **options: Any) -> set[int]:
    """What is banned after these tokens."""
    scores = random_scores(0, len(tokenizer) if tokenizer else VOCABULARY)
    return banned(filtered(scores, tokens, start, encode=tokenizer.encode if tokenizer else refuse_to_encode, **options))


def by_transformers(processor: Any, scores: Scores, tokens: Sequence[int]) -> Scores:
    import torch

    result: Scores = processor(torch.tensor([tokens]), torch.from_numpy(scores.copy())[None])[0].numpy()
    return result


def test_options_that_ask_for_nothing_give_no_filters() -> None:
    assert filters_for(Options(), ending=[EOS], encode=refuse_to_encode, vocabulary=VOCABULARY) == ()


@pytest.mark.parametrize("as_array", [False, True], ids=["list", "array"])
@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_repetition_penalty_equals_transformers(penalty: float, as_array: bool) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    scores, tokens = random_scores(1), random_tokens(1, 30)
    given: Any = np.array(tokens) if as_array else tokens
    ours = filtered(scores, given, 12, repetition_penalty=penalty)
    np.testing.assert_allclose(ours, by_transformers(RepetitionPenaltyLogitsProcessor(penalty), scores, tokens), rtol=1e-6)
    assert not np.array_equal(ours, scores)


def test_repetition_penalty_counts_prompt_and_generated_once_each() -> None:
    scores = np.array([-1, -2, -3, -np.inf], np.float32)
    assert filtered(scores, [1, 1, 3, 2, 1], 3, repetition_penalty=2.0).tolist() == [-1, -4, -6, -np.inf]


def test_presence_and_frequency_count_only_what_was_generated() -> None:
    scores, tokens, start = random_scores(2), random_tokens(2, 60), 25
    ours = filtered(scores, tokens, start, presence_penalty=0.7, frequency_penalty=0.25)
    counts = [tokens[start:].count(token) for token in range(VOCABULARY)]
    expected = [score - (0.7 if count else 0) - 0.25 * count for score, count in zip(scores.tolist(), counts, strict=True)]
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    assert max(counts) > 1
    assert 0 in counts


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_negative_penalty_favours_what_was_generated(name: str) -> None:
    ours = filtered(np.array([-1, -2, -3], np.float32), [0, 1, 1], 1, **{name: -0.5})
    assert ours.tolist() == [-1, -1.5 if name == "presence_penalty" else -1.0, -3]


def test_nothing_was_generated_and_nothing_is_penalised() -> None:
    scores = random_scores(3)
    ours = filtered(scores, random_tokens(3, 9), 9, presence_penalty=1.0, frequency_penalty=1.0)
    np.testing.assert_array_equal(ours, scores)


@pytest.mark.parametrize("as_array", [False, True], ids=["list", "array"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 2, 3, 30, 200])
def test_no_repeat_ngram_equals_transformers(size: int, length: int, as_array: bool) -> None:
    from transformers import NoRepeatNGramLogitsProcessor

    scores, tokens = random_scores(5), random_tokens(length, length, vocabulary=3)
    given: Any = np.array(tokens) if as_array else tokens
    ours = filtered(scores, given, length // 2, no_repeat_ngram=size)
    np.testing.assert_array_equal(ours, by_transformers(NoRepeatNGramLogitsProcessor(size), scores, tokens))


def test_no_repeat_ngram_bans_what_followed_the_same_tokens_before() -> None:
    assert after([5, 6, 7, 5, 6, 8, 5, 6], no_repeat_ngram=3) == {7, 8}
    assert after([5, 6, 7, 5, 6, 8, 5, 9], no_repeat_ngram=3) == set()
    assert after([5, 6, 5], no_repeat_ngram=1) == {5, 6}
    assert after([5, 5], no_repeat_ngram=2) == {5}
    assert after([], no_repeat_ngram=1) == set()


@pytest.mark.parametrize("seed", range(5))
def test_bad_words_as_tokens_equal_transformers(seed: int) -> None:
    from transformers import NoBadWordsLogitsProcessor

    rng = np.random.default_rng(seed)
    scores, tokens = random_scores(seed), random_tokens(seed, 30, vocabulary=3)
    words = [rng.integers(3, size=rng.integers(2, 5)).tolist() for _ in range(12)] + [[*tokens[-3:], 20], [30]]
    ours = filtered(scores, tokens, 10, bad_words=words)
    np.testing.assert_array_equal(ours, by_transformers(NoBadWordsLogitsProcessor(words), scores, tokens))
    assert {20, 30} <= banned(ours)


def test_bad_words_are_banned_where_the_tokens_before_match() -> None:
    words = [[9], [5, 6, 7], [6, 8], [5, 6, 7]]
    assert after([5, 6], bad_words=words) == {9, 7, 8}
    assert after([4, 6], bad_words=words) == {9, 8}
    assert after([6], bad_words=words) == {9, 8}
    assert after([6, 5], bad_words=words) == {9}
    assert after([], bad_words=words) == {9}
    assert banned(filtered(random_scores(0), np.array([5, 6]), 1, bad_words=words)) == {9, 7, 8}  # type: ignore[arg-type]


def test_a_bad_word_of_byte_pairs_is_banned_with_a_space_before_it_and_without() -> None:
    alone, inside = BPE.encode("object"), BPE.encode(" object")
    assert alone != inside[-len(alone) :], "the example must be one that a space changes"
    assert alone[-1] in after(alone[:-1], BPE, bad_words=["object"])
    assert inside[-1] in after(inside[:-1], BPE, bad_words=["object"])
    assert inside[-1] not in after([*inside[:-1], alone[0]], BPE, bad_words=["objects of art"])


def test_a_bad_word_of_characters_is_banned_wherever_it_stands() -> None:
    letters = characters_of(["abc "])
    a, b, c, space = letters.encode("abc ")
    for before in ([a, b], [space, a, b], [c, a, b], [c, c, a, b]):
        assert after(before, letters, bad_words=["abc"]) == {c}
    assert after([space, b], letters, bad_words=["abc"]) == set()


def test_a_bad_word_of_words_is_banned_and_an_unknown_one_bans_no_other_unknown_word() -> None:
    words = words_of(["good bad word"])
    assert after([], words, bad_words=["bad"]) == {words.token_id("bad")}
    assert after([words.token_id("bad")], words, bad_words=["bad word"]) == {words.token_id("word")}
    assert after([], words, bad_words=["unheard"]) == set()
    assert after([], words, bad_words=[[UNK]]) == {UNK}


def test_a_constraint_sees_the_generated_tokens_and_bans_all_others() -> None:
    seen: list[Sequence[int]] = []

    def constraint(generated: Sequence[int]) -> set[int]:
        seen.append(generated)
        return {3, 5}

    scores = random_scores(6)
    for tokens in ([8, 9, 10, 11], np.array([8, 9, 10, 11])):
        ours = filtered(scores, tokens, 2, constraint=constraint)  # type: ignore[arg-type]
        assert banned(ours) == set(range(VOCABULARY)) - {3, 5}
        assert ours[[3, 5]].tolist() == scores[[3, 5]].tolist()
    assert seen == [[10, 11], [10, 11]]
    assert isinstance(seen[1], list)


@pytest.mark.parametrize("allowed", [(5,), [5, 5], {5}, frozenset([5]), np.array([5]), range(5, 6), iter([5]), {5: "five"}])
def test_a_constraint_may_give_any_collection(allowed: Any) -> None:
    assert after([1], constraint=lambda generated: allowed) == set(range(VOCABULARY)) - {5}


def test_a_constraint_of_none_allows_all_and_of_nothing_allows_none() -> None:
    assert after([1], constraint=lambda generated: None) == set()
    assert after([1], constraint=lambda generated: []) == set(range(VOCABULARY))


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_constraint_outside_the_vocabulary_is_named(token: int) -> None:
    message = f"the constraint allowed token {token}, but the vocabulary has 0 to 39; allow only those"
    with pytest.raises(GenerationError, match=f"^{message}$"):
        after([1], constraint=lambda generated: [3, token])


def test_a_constraint_that_gives_no_token_numbers_is_an_error() -> None:
    wrong: dict[str, Any] = {
        "the constraint gave 5, expected token numbers, or None for any token": 5,
        r"the constraint gave \[\[1\], \[2, 3\]\], expected token numbers, or None for any token": [[1], [2, 3]],
        r"the constraint gave float64 values such as 1.5, expected whole token numbers": [1.5],
        r"the constraint gave bool values such as True, expected whole token numbers": np.ones(VOCABULARY, bool),
        r"the constraint gave <U1 values such as 'a', expected whole token numbers": "ab",
    }
    for message, value in wrong.items():
        with pytest.raises(GenerationError, match=f"^{message}$"):
            after([1], constraint=lambda generated, value=value: value)


def test_tokens_that_do_not_exist_are_refused_before_the_start() -> None:
    wrong: dict[str, tuple[Sequence[int], Any]] = {
        "bad_words holds token 40, but the vocabulary has 0 to 39; leave it out": ([EOS], [[1, 40]]),
        "bad_words holds token -1, but the vocabulary has 0 to 39; leave it out": ([EOS], [[-1]]),
        "bad_words holds 1.5, expected a token number from 0 to 39": ([EOS], [[1.5]]),
        "stop_tokens holds token 99, but the vocabulary has 0 to 39; leave it out": ([EOS, 99], []),
    }
    for message, (ending, bad_words) in wrong.items():
        with pytest.raises(OptionError, match=f"^{message}$"):
            filters_for(Options(bad_words=bad_words), ending=ending, encode=refuse_to_encode, vocabulary=VOCABULARY)


def test_a_bad_word_that_is_only_white_space_to_the_tokenizer_is_refused() -> None:
    with pytest.raises(OptionError, match=r"^bad_words holds ' ', which the tokenizer makes no tokens of; leave it out$"):
        after([], words_of(["a b"]), bad_words=[" "])


def test_filters_combine_and_a_ban_outlives_every_penalty() -> None:
    scores = filtered(
        np.array([-1, -2, -3, -4, -5, -6], np.float32),
        [4, 3, 3],
        1,
        ending=[2],
        repetition_penalty=2.0,
        presence_penalty=-3.0,
        frequency_penalty=-2.0,
        no_repeat_ngram=1,
        bad_words=[[0]],
        constraint=lambda generated: [0, 1, 2, 3, 4],
    )
    assert scores.tolist() == [-np.inf, -2, -3, -np.inf, -np.inf, -np.inf]


@pytest.mark.parametrize("generated", [0, 2, 3, 4])
def test_the_end_before_its_time_is_banned_as_transformers_does(generated: int) -> None:
    from transformers import MinNewTokensLengthLogitsProcessor

    from runtime.generation.search import Request, edited

    scores, tokens = random_scores(4), random_tokens(4, 5 + generated)
    theirs = by_transformers(MinNewTokensLengthLogitsProcessor(5, 3, [EOS, 7]), scores, tokens)
    options = Options(min_new_tokens=3, stop_tokens=[7])
    request = Request(options, tuple(tokens[:5]), (), 9, EOS, (), lambda numbers: "")
    ours = scores.copy()[None]
    edited(request, ours, [tuple(tokens[5:])])
    np.testing.assert_array_equal(ours[0], theirs)
    assert request.banned(generated) == ((EOS, 7) if generated < 3 else ())
