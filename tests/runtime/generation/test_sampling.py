"""Drawing: the candidates are transformers' and the plain definitions', and the draws follow the probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.errors import GenerationError
from runtime.generation.numeric import log_softmax
from runtime.generation.options import Options
from runtime.generation.sampling import draw, restrict

Scores = NDArray[np.float32]


def random_scores(seed: int, vocabulary: int, spread: float = 3.0) -> Scores:
    return log_softmax((np.random.default_rng(seed).standard_normal((1, vocabulary)) * spread).astype(np.float32))[0]


def restricted(scores: Scores, **options: Any) -> Scores:
    result = scores.copy()
    restrict(result, Options(**({"temperature": 1.0} | options)))
    return result


def kept(scores: Scores) -> list[int]:
    found: list[int] = np.flatnonzero(scores > -np.inf).tolist()
    return found


def by_transformers(scores: Scores, temperature: float, **limits: Any) -> Scores:
    import torch
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: dict[str, Any] = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    result = TemperatureLogitsWarper(temperature)(None, torch.from_numpy(scores.copy())[None])
    for name, warper in warpers.items():
        if name in limits:
            result = warper(limits[name])(None, result)
    warped: Scores = result[0].numpy()
    return warped


@pytest.mark.parametrize("vocabulary", [12, 900, 50257])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"top_k": 5},
        {"top_k": 400},
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 50, "top_p": 0.8, "min_p": 0.1},
        {"top_p": 0.7, "min_p": 0.01},
    ],
    ids=str,
)
def test_candidates_equal_transformers(vocabulary: int, temperature: float, limits: dict[str, Any]) -> None:
    scores = random_scores(vocabulary, vocabulary)
    ours, theirs = restricted(scores, temperature=temperature, **limits), by_transformers(scores, temperature, **limits)
    difference = set(kept(ours)) ^ set(kept(theirs))
    # Their float32 sum of 50,000 probabilities is off by up to 1e-6, which moves the last of top_p=0.999 by a few.
    assert len(difference) <= (5 if limits.get("top_p") == 0.999 else 0)
    both = [token for token in kept(ours) if token not in difference]
    np.testing.assert_allclose(ours[both], theirs[both], rtol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 2000), st.floats(0.01, 0.999))
def test_top_p_keeps_the_fewest_that_reach_it(seed: int, vocabulary: int, top_p: float) -> None:
    scores = random_scores(seed, vocabulary)
    chosen = kept(restricted(scores, top_p=top_p))
    probabilities = np.exp(scores.astype(np.float64))
    probabilities /= probabilities.sum()
    inside = probabilities[chosen]
    others = np.delete(probabilities, chosen)
    assert inside.sum() >= top_p - 1e-6
    assert inside.sum() - inside.min() < top_p + 1e-6
    assert others.size == 0 or others.max() <= inside.min()


def test_top_p_takes_the_likeliest_until_it_is_reached() -> None:
    scores = np.log(np.array([0.125, 0.5, 0.25, 0.125], np.float32))
    assert kept(restricted(scores, top_p=0.49)) == [1]
    assert kept(restricted(scores, top_p=0.51)) == [1, 2]
    assert kept(restricted(scores, top_p=0.80)) == [0, 1, 2]  # of equals the first
    assert kept(restricted(scores, top_p=1.0)) == [0, 1, 2, 3]
    assert kept(restricted(scores, top_p=1e-9)) == [1]


def test_top_p_is_of_what_top_k_left() -> None:
    scores = np.log(np.array([0.4, 0.2, 0.2, 0.2], np.float32))
    assert kept(restricted(scores, top_k=2, top_p=0.65)) == [0]  # 0.4 of 0.6
    assert kept(restricted(scores, top_p=0.65)) == [0, 1, 2]


def test_top_p_of_a_flat_distribution_looks_at_all_that_are_needed() -> None:
    assert len(kept(restricted(np.zeros(50257, np.float32), top_p=0.5))) in range(25128, 25131)


def test_top_k_keeps_exactly_so_many_also_of_equals() -> None:
    assert kept(restricted(np.zeros(50, np.float32), top_k=3)) == [0, 1, 2]
    assert kept(restricted(np.zeros(3, np.float32), top_k=50)) == [0, 1, 2]


def test_min_p_is_relative_to_the_likeliest() -> None:
    scores = np.log(np.array([0.5, 0.26, 0.2, 0.04], np.float32))
    assert kept(restricted(scores, min_p=0.5)) == [0, 1]
    assert kept(restricted(scores, min_p=0.0)) == [0, 1, 2, 3]
    assert kept(restricted(scores, min_p=1.0)) == [0]


@pytest.mark.parametrize("limits", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.2}], ids=str)
def test_what_was_banned_stays_banned(limits: dict[str, Any]) -> None:
    scores = np.full(5000, -np.inf, np.float32)
    scores[[70, 4999]] = [-1, -1.2]
    assert kept(restricted(scores, **limits)) == [70, 4999]
    scores[:] = -np.inf
    with np.errstate(invalid="raise"):
        assert kept(restricted(scores, **limits)) == []


def test_any_temperature_leaves_the_likeliest() -> None:
    scores = random_scores(8, 100)
    for temperature in (5e-324, 1e-40, 1e-9):
        assert draw(restricted(scores, temperature=temperature), 0.999) == scores.argmax()
    assert len(kept(restricted(scores, temperature=1e30))) == 100


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 2000), st.floats(0, 1, exclude_max=True))
def test_draw_is_the_first_token_whose_cumulative_probability_exceeds_the_number(seed: int, vocabulary: int, u: float) -> None:
    scores = random_scores(seed, vocabulary)
    scores[np.random.default_rng(seed).random(vocabulary) < 0.3] = -np.inf
    scores[vocabulary // 2] = -1
    weights = [float(np.exp(score)) for score in scores]
    token = draw(scores, u)
    below, above = sum(weights[:token]) / sum(weights), sum(weights[: token + 1]) / sum(weights)
    assert below - 1e-6 <= u <= above + 1e-6
    assert weights[token] > 0


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_range_draw_a_token_that_is_possible(uniform: float) -> None:
    scores = np.array([-np.inf, -200, 0, -1, -0.5, -200, -np.inf], np.float32)
    for total in np.linspace(-3, 0, 50):
        assert draw(scores + np.float32(total), uniform) == (2 if uniform == 0 else 4)


def test_a_draw_at_the_edge_of_a_run_of_sums_is_a_token_that_is_possible() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        scores = 8 * rng.standard_normal((4, 512)).astype(np.float32)  # so far apart that float64 must round their sum
        scores[0] = scores[:, -40:] = scores[:, :40] = -np.inf
        weights = np.exp(scores - scores.max())
        ends = np.cumsum([math.fsum(row) for row in weights.tolist()])
        for uniform in ends[:-1] / ends[-1]:
            for step in range(-6, 7):  # of a last bit, in which ways of adding up differ
                nearby = max(0.0, uniform + step * np.spacing(uniform))
                assert scores.reshape(-1)[draw(scores.reshape(-1), nearby)] > -np.inf


def test_draws_follow_the_probabilities() -> None:
    probabilities = np.array([0.1, 0.0, 0.6, 0.3])
    with np.errstate(divide="ignore"):
        scores = np.log(probabilities).astype(np.float32) - 7  # need not be normalised
    drawn = [draw(scores, number) for number in np.random.default_rng(0).random(4000)]
    # four standard deviations of a share of 4,000: 4 × √(0.25 / 4000)
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4000, probabilities, atol=0.032)
    assert 1 not in drawn


def test_a_draw_is_the_same_from_a_row_of_a_batch() -> None:
    batch = np.stack([random_scores(seed, 5003) for seed in range(4)])
    padded = np.concatenate([batch, np.full((4, 9), -np.inf, np.float32)], axis=1)[:, :5003]
    for row in range(4):
        for uniform in np.random.default_rng(row).random(20):
            assert draw(batch[row].copy(), uniform) == draw(padded[row], uniform) == draw(batch[row], uniform)


def test_a_draw_among_nothing_is_an_error() -> None:
    message = "no token is allowed next; loosen the constraint, bad_words, no_repeat_ngram or min_new_tokens"
    with pytest.raises(GenerationError, match=f"^{message}$"):
        draw(np.full(5, -np.inf, np.float32), 0.5)
