"""Baselines are what they say: Kneser–Ney's equation, distributions that sum to one, no peeking at held-out parts."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise
from pydoc_data.topics import topics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import DataError, OptionError
from toolkit.baselines import KneserNey, tfidf_accuracy
from toolkit.data.dataset import DataSettings
from toolkit.data.text_data import Documents, LabelledTexts, split_texts

TEXT = topics["assert"] + topics["del"] + topics["pass"] + topics["yield"] + topics["while"]


@pytest.mark.parametrize("modified", [False, True])
@pytest.mark.parametrize("order", [1, 2, 4, 6])
def test_probabilities_sum_to_one_after_any_context(order: int, modified: bool) -> None:
    model = KneserNey(order=order, modified=modified).fit(TEXT)
    source = random.Random(0)
    starts = [source.randrange(len(TEXT)) for _ in range(8)]
    contexts = [TEXT[start : start + length] for start in starts for length in (0, 2, 7)] + ["zq☃", "☃", "x☃th", TEXT[:9]]
    for context in contexts:
        probabilities = [model.probability(character, context) for character in model.vocabulary]
        assert sum(probabilities) == pytest.approx(1, abs=1e-9)
        assert min(probabilities) > 0


@given(st.text("ab", min_size=1, max_size=12), st.integers(1, 5), st.text("abc", min_size=1, max_size=5), st.booleans())
def test_short_texts_give_distributions_too(text: str, order: int, held_out: str, modified: bool) -> None:
    model = KneserNey(order=order, modified=modified).fit(text)
    assert sum(model.probability(character, held_out) for character in model.vocabulary) == pytest.approx(1)
    assert 0 <= model.bits_per_character(held_out) < 100


def test_two_characters_by_the_equation() -> None:
    text = "abacabadab"
    model = KneserNey(order=2).fit(text)
    pairs = Counter(pairwise(text))  # ab 3, ba 2, ac 1, ca 1, ad 1, da 1
    upper = 4 / (4 + 2 * 1)
    # the different characters before: a by b, c, d and by the beginning; b, c, d by a alone
    before = {"a": 4, "b": 1, "c": 1, "d": 1}
    lower = 3 / (3 + 2 * 0)
    uniform = 1 / 5  # four letters and the unknown
    base = {c: max(before.get(c, 0) - lower, 0) / 7 + lower * 4 / 7 * uniform for c in "abcd☃"}
    for character in "abcd☃":
        expected = max(pairs["a", character] - upper, 0) / 5 + upper * 3 / 5 * base[character]
        assert model.probability(character, "xa") == pytest.approx(expected)
        assert model.probability(character, "☃") == pytest.approx(base[character])
    expected = -math.log2(base["a"]) - math.log2(model.probability("b", "a"))
    assert model.bits_per_character("ab") == pytest.approx(expected / 2)


def test_more_context_helps() -> None:
    train, held_out = "\n\n".join(topics[name] for name in ("if", "for", "try", "with", "class", "function")), topics["while"]
    bits = [KneserNey(order=order).fit(train).bits_per_character(held_out) for order in (1, 2, 4)]
    assert bits[0] > bits[1] + 0.5 > bits[2] + 1.0


def test_the_modified_form_takes_more_from_larger_counts() -> None:
    model, plain = KneserNey(order=2, modified=True).fit(TEXT), KneserNey(order=2).fit(TEXT)
    pairs = Counter(pairwise(TEXT))
    once, twice, thrice, four = (Counter(pairs.values())[size] for size in (1, 2, 3, 4))
    share = once / (once + 2 * twice)
    discounts = (1 - 2 * share * twice / once, 2 - 3 * share * thrice / twice, 3 - 4 * share * four / thrice)
    assert 0 < discounts[0] < discounts[1] < discounts[2]
    following = {character: count for (first, character), count in pairs.items() if first == "e"}
    total = sum(following.values())
    rest = sum(discounts[min(count, 3) - 1] for count in following.values()) / total
    for character in "n e☃":
        count = following.get(character, 0)
        kept = count - discounts[min(count, 3) - 1] if count else 0
        assert model.probability(character, "e") == pytest.approx(kept / total + rest * model.probability(character, ""))
        assert model.probability(character, "e") != pytest.approx(plain.probability(character, "e"), rel=1e-6)


def test_documents_are_joined_into_one_stream() -> None:
    assert Documents("x", ("a", "b\n", "c")).stream == "a\n\nb\n\n\nc"


def test_an_empty_text_or_an_odd_order_is_refused() -> None:
    with pytest.raises(DataError, match="to fit an n-gram model to is empty"):
        KneserNey().fit("")
    with pytest.raises(DataError, match="to measure an n-gram model on is empty"):
        KneserNey().fit("a").bits_per_character("")
    with pytest.raises(OptionError, match="of order 0 is not possible; expected 1 to 20"):
        KneserNey(order=0)


def test_logistic_regression_learns_from_the_training_part_alone() -> None:
    source = random.Random(0)
    words = {0: "sum product number matrix", 1: "file path open read"}
    rows = [(label, " ".join(source.choice([*words[label].split(), "the", "of"]) for _ in range(6))) for label in (0, 1) * 40]
    rows = [(label, f"{text} word{place}") for place, (label, text) in enumerate(rows)]
    data = LabelledTexts("x", tuple(text for _, text in rows), np.array([label for label, _ in rows]), ("maths", "files"))
    found = tfidf_accuracy(data, DataSettings())
    assert found.test >= 90
    train, validation, test = split_texts(data, DataSettings())
    assert found.features == len({gram for text in train.texts for gram in grams(text)})
    assert found.features < len({gram for part in (train, validation, test) for text in part.texts for gram in grams(text)})


def grams(text: str) -> set[str]:
    words = text.split()
    return {*words, *map(" ".join, pairwise(words))}
