"""Metrics of text, classes and quantities equal independent implementations."""

from __future__ import annotations

import math
import random
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU

from runtime.errors import OptionError
from runtime.metrics import (
    bits_per_character,
    bleu,
    bleu_d2l,
    confusion_matrix,
    cross_entropy,
    edit_distance,
    error_rate,
    perplexity,
    r2,
    word_error_rate,
)

words = st.lists(st.sampled_from("abcd"), max_size=9)
corpus = st.lists(st.tuples(words, st.lists(words, min_size=2, max_size=2)), min_size=1, max_size=5)


def recursive_distance(first: str, second: str) -> int:
    @cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (first[i - 1] != second[j - 1]))

    return distance(len(first), len(second))


@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
def test_edit_distance_equals_its_definition(first: str, second: str) -> None:
    expected = recursive_distance(first, second)
    assert edit_distance(first, second) == edit_distance(list(second), list(first)) == expected


def test_edit_distance_of_long_sequences() -> None:
    source = random.Random(0)
    for _ in range(5):
        first, second = ("".join(source.choice("abcd") for _ in range(source.randrange(40, 80))) for _ in range(2))
        assert edit_distance(first, second) == recursive_distance(first, second)
    assert edit_distance("kitten", "sitting") == 3


def test_error_rates_count_against_the_nearest_reference() -> None:
    predictions = [["R", "IY", "D"], ["K", "AE", "T"], []]
    references = [[["R", "EH", "D"], ["R", "IY", "D"]], [["K", "AH", "T", "AH"], ["D", "AO", "G", "Z"]], [["B"]]]
    assert error_rate(predictions, references) == pytest.approx(100 * (0 + 2 + 1) / (3 + 4 + 1))
    assert word_error_rate(predictions, references) == pytest.approx(200 / 3)
    assert error_rate([["a"]], [[["a"]]]) == word_error_rate([("a",)], [[["a"]]]) == 0
    assert error_rate([["a", "b", "c"]], [[["x"], ["a", "b", "c", "d"]]]) == 25.0
    with pytest.raises(OptionError, match="2 predictions have references for 1; give one or more for each"):
        error_rate([["a"], ["b"]], [[["a"]], []])


def sacrebleus(pairs: list, order: int, smoothing: str) -> float:
    metric = BLEU(tokenize="none", smooth_method=smoothing, max_ngram_order=order, force=True)
    streams = zip(*[[" ".join(reference) for reference in references] for _, references in pairs], strict=True)
    return metric.corpus_score([" ".join(hypothesis) for hypothesis, _ in pairs], [list(stream) for stream in streams]).score


@given(corpus, st.integers(1, 4), st.sampled_from(["exp", "none"]))
def test_bleu_equals_sacrebleus(pairs: list, order: int, smoothing: str) -> None:
    hypotheses, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    assert bleu(hypotheses, references, order=order, smoothing=smoothing) == pytest.approx(
        sacrebleus(pairs, order, smoothing), abs=1e-6
    )


def test_bleu_of_longer_texts_equals_sacrebleus() -> None:
    source = random.Random(1)
    pairs = []
    for _ in range(40):
        reference = [source.choice("abcdefgh") for _ in range(source.randrange(5, 30))]
        hypothesis = [token if source.random() < 0.8 else "x" for token in reference][: source.randrange(4, 31)]
        pairs.append((hypothesis, [reference, reference[1:]]))
    score = bleu([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    assert score == pytest.approx(sacrebleus(pairs, 4, "exp"), abs=1e-6)
    assert 20 < score < 80
    assert bleu(["abcd"], [["abcd"]]) == pytest.approx(100)
    with pytest.raises(OptionError, match="smoothing is 'floor', expected 'exp' or 'none'"):
        bleu([["a"]], [[["a"]]], smoothing="floor")


def test_the_d2l_form_of_bleu() -> None:
    prediction, label = ["a", "b", "b", "c", "d"], ["a", "b", "c", "d", "e", "f"]
    # one b too many: 4 of 5 words, 3 of 4 pairs (a b, b c, c d); one word short of the label
    assert bleu_d2l(prediction, label, 2) == pytest.approx(math.exp(1 - 6 / 5) * (4 / 5) ** 0.5 * (3 / 4) ** 0.25)
    assert bleu_d2l(label, label, 4) == 1.0
    assert bleu_d2l(["a"], ["a"], 4) == 1.0
    assert bleu_d2l([], label, 2) == 0.0
    assert bleu_d2l(["x", "y"], label, 2) == 0.0


def test_cross_entropy_equals_pytorchs() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(3, 5, 7, generator=generator)
    targets = torch.randint(0, 7, (3, 5), generator=generator)
    for ignore, number in ((0, 0), (None, -100)):
        nats, count = cross_entropy(logits.numpy(), targets.numpy(), ignore=ignore)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=number)
        assert nats / count == pytest.approx(expected.item(), rel=1e-5)
    assert cross_entropy(np.zeros((2, 3)), np.zeros(2, np.int64)) == (0.0, 0)


def test_a_uniform_model_is_as_unsure_as_its_vocabulary_is_large() -> None:
    nats, count = cross_entropy(np.zeros((6, 8)), np.arange(1, 7))
    assert perplexity(nats, count) == pytest.approx(8)
    assert bits_per_character(nats, count) == pytest.approx(3)
    assert bits_per_character(nats, 2 * count) == pytest.approx(1.5)
    assert perplexity(1e6, 1) == math.inf


def test_r2_and_confusion_matrix_equal_scikit_learns() -> None:
    from sklearn.metrics import confusion_matrix as sklearn_confusion
    from sklearn.metrics import r2_score

    source = np.random.default_rng(0)
    values, targets = source.standard_normal((50, 1)), source.standard_normal(50)
    assert r2(values, targets) == pytest.approx(r2_score(targets, values[:, 0]))
    assert math.isnan(r2(values, np.ones(50)))
    predicted, labels = source.integers(0, 4, 60), source.integers(0, 4, 60)
    np.testing.assert_array_equal(confusion_matrix(predicted, labels, 5), sklearn_confusion(labels, predicted, labels=range(5)))
    with pytest.raises(OptionError, match="predicted hold 0 to 4, expected classes of 0 to 3"):
        confusion_matrix(np.array([0, 4]), np.array([0, 1]), 4)
