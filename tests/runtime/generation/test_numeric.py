"""Log-probabilities and the likeliest tokens: equal to plain definitions, the same bits alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.generation.numeric import log_softmax, log_sum_exp, top

Floats = NDArray[np.float32]
SHAPES = [(1, 1), (1, 80), (7, 41), (3, 1000), (2, 4097), (5, 32000), (1, 50257), (4, 50257), (2, 150_000), (0, 10)]
TIE_FREE, TIED, EQUAL, BANNED, IMPOSSIBLE = "tie-free", "tied", "all equal", "mostly -inf", "all -inf"


def logits_of(shape: tuple[int, int], *, spread: float = 4.0, shift: float = 0.0) -> Floats:
    return (np.random.default_rng(0).standard_normal(shape) * spread + shift).astype(np.float32)


def exact_log_softmax(logits: Floats) -> NDArray[np.float64]:
    exact = logits.astype(np.longdouble)
    exact = exact - exact.max(axis=1, keepdims=True, initial=-np.inf)
    return (exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))).astype(np.float64)


def scores_of(kind: str, rows: int, vocabulary: int) -> Floats:
    rng = np.random.default_rng(rows * vocabulary)
    if kind == TIED:
        return np.round(rng.standard_normal((rows, vocabulary)) * 2).astype(np.float32)
    if kind in (EQUAL, IMPOSSIBLE):
        return np.full((rows, vocabulary), -np.inf if kind == IMPOSSIBLE else -1.5, np.float32)
    scores = rng.permutation(rows * vocabulary).reshape(rows, vocabulary).astype(np.float32) - vocabulary
    if kind == BANNED:
        scores[rng.random((rows, vocabulary)) > 5 / vocabulary] = -np.inf
    return scores


def sorted_top(scores: Floats, k: int) -> tuple[Floats, NDArray[np.int64]]:
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, ids, axis=1), ids


def assert_top_is_exact(scores: Floats, k: int) -> None:
    before = scores.copy()
    values, ids = top(scores, k)
    expected_values, expected_ids = sorted_top(scores, k)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(scores, before)
    assert (values.dtype, ids.dtype) == (np.float32, np.int64)


# float32 has steps of 2⁻²⁴ relative to the result, here up to 40 (2.4e-6); the sum of 150,000 terms adds up to 2e-6 (measured).
@pytest.mark.parametrize("shape", SHAPES)
def test_log_softmax_equals_the_formula_in_extended_precision(shape: tuple[int, int]) -> None:
    logits = logits_of(shape)
    expected = exact_log_softmax(logits)
    assert log_softmax(logits) is logits
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("shift", [-1e4, -200.0, 200.0, 1e4])
def test_log_softmax_loses_nothing_to_logits_far_from_zero(shift: float) -> None:
    logits = logits_of((3, 5000), shift=shift)
    np.testing.assert_allclose(log_softmax(logits.copy()), exact_log_softmax(logits), rtol=0, atol=5e-6)


def test_log_softmax_keeps_what_is_banned_and_one_token_has_all_the_probability() -> None:
    logits = np.array([[-np.inf, 3.0, -np.inf], [0.0, -np.inf, 0.0]], np.float32)
    np.testing.assert_allclose(log_softmax(logits), [[-np.inf, 0, -np.inf], [-np.log(2), -np.inf, -np.log(2)]], rtol=1e-6)


def test_log_softmax_works_on_a_strided_view_of_the_logits() -> None:
    logits = logits_of((6, 300)).reshape(3, 2, 300)
    first, expected = logits[:, 0].copy(), exact_log_softmax(logits[:, 1])
    log_softmax(logits[:, 1])
    np.testing.assert_allclose(logits[:, 1], expected, rtol=0, atol=5e-6)
    np.testing.assert_array_equal(logits[:, 0], first)


@pytest.mark.parametrize("shape", SHAPES)
def test_log_sum_exp_leaves_the_logits_as_they_are(shape: tuple[int, int]) -> None:
    logits = logits_of(shape)
    before, expected = logits.copy(), exact_log_softmax(logits)
    np.testing.assert_allclose(logits - log_sum_exp(logits)[:, None], expected, rtol=0, atol=5e-6)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("vocabulary", [5, 63, 80, 1001, 32000, 50257])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(vocabulary: int) -> None:
    logits = logits_of((9, vocabulary))
    together, sums = log_softmax(logits.copy()), log_sum_exp(logits)
    for row in range(9):
        alone = logits[row : row + 1].copy()
        assert log_sum_exp(alone)[0] == sums[row]
        np.testing.assert_array_equal(log_softmax(alone)[0], together[row])


@pytest.mark.parametrize("kind", [TIE_FREE, TIED, EQUAL, BANNED, IMPOSSIBLE])
@pytest.mark.parametrize("vocabulary", [1, 2, 33, 991, 992, 993, 1024, 4097, 32000, 50257])
@pytest.mark.parametrize("k", [1, 2, 10, 50])
def test_top_equals_a_stable_sort(kind: str, vocabulary: int, k: int) -> None:
    assert_top_is_exact(scores_of(kind, 3, vocabulary), k)


@pytest.mark.parametrize("k", [784, 785, 786, 1571, 1572, 5000, 50256, 50257, 50258])
def test_top_may_ask_for_much_of_the_vocabulary_or_more_than_it_has(k: int) -> None:
    assert_top_is_exact(scores_of(TIED, 1, 50257), k)
    assert top(scores_of(TIED, 2, 50257), k)[0].shape == (2, min(k, 50257))


def test_top_of_equals_takes_the_smaller_id_also_across_blocks() -> None:
    scores = np.full((2, 50257), -9, np.float32)
    scores[0, [50000, 40001, 3, 50256]] = 1
    scores[1, [50256, 1571]] = [0.0, -0.0]  # equal numbers
    assert top(scores, 3)[1].tolist() == [[3, 40001, 50000], [1571, 50256, 0]]


def test_top_finds_the_last_tokens_which_not_every_block_has() -> None:
    scores = np.full((1, 50257), -np.inf, np.float32)
    scores[0, -3:] = [1, 3, 2]
    values, ids = top(scores, 5)
    assert ids.tolist() == [[50255, 50256, 50254, 0, 1]]
    assert values.tolist() == [[3, 2, 1, -np.inf, -np.inf]]


def test_top_takes_the_last_token_once_though_a_block_without_it_is_looked_into() -> None:
    scores = np.full((1, 50257), -9, np.float32)  # 32 tokens in each of the first 1556 blocks, 31 in the other 15
    scores[0, [1556, 1570, 50256]] = [3, 2, 1]
    assert top(scores, 4)[1].tolist() == [[1556, 1570, 50256, 0]]


def test_top_of_a_strided_view_and_of_no_rows() -> None:
    scores = scores_of(TIE_FREE, 4, 5000).reshape(2, 2, 5000)[:, 1]
    assert_top_is_exact(scores, 4)
    assert top(np.empty((0, 5000), np.float32), 4)[1].shape == (0, 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3000), st.integers(1, 60), st.integers(1, 40), st.integers(0, 2**32))
def test_top_is_exact_however_many_are_equal(rows: int, vocabulary: int, k: int, distinct: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    levels = np.append(rng.standard_normal(distinct), -np.inf).astype(np.float32)
    assert_top_is_exact(rng.choice(levels, (rows, vocabulary)), k)
