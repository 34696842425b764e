"""Ranking by onnxruntime: equal to a stable sort and to the formula, the same bits alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest

from exporters.ranking_graph import PATH, ranking_graph
from runtime.generation.ranking import Ranking

from .test_numeric import BANNED, EQUAL, TIE_FREE, TIED, exact_log_softmax, logits_of, scores_of


@pytest.mark.parametrize("kind", [TIE_FREE, TIED, EQUAL, BANNED])
@pytest.mark.parametrize("vocabulary", [1, 2, 33, 1001, 32000, 50257])
@pytest.mark.parametrize("count", [1, 2, 10])
def test_the_best_are_those_of_a_stable_sort(kind: str, vocabulary: int, count: int) -> None:
    logits = scores_of(kind, 3, vocabulary)
    before = logits.copy()
    _, tokens = Ranking(1).best(logits, count)
    np.testing.assert_array_equal(tokens, np.argsort(-before, axis=1, kind="stable")[:, :count])
    np.testing.assert_array_equal(logits, before)


# onnxruntime adds up a row's exponentials in float32, in an order that differs from CPU to CPU: the error grows as the root of
# their number. At 150,000 tokens, of which three such roots are 7e-5, a Xeon gave 1.8e-5 and an EPYC 3.5e-5.
@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("vocabulary", [5, 43, 32000, 150_000])
def test_log_probabilities_equal_the_formula_in_extended_precision(vocabulary: int, shift: float) -> None:
    logits = logits_of((3, vocabulary), shift=shift)
    logprobs, tokens = Ranking(1).best(logits, 4)
    exact = np.take_along_axis(exact_log_softmax(logits), tokens, axis=1)
    np.testing.assert_allclose(logprobs, exact, rtol=0, atol=max(5e-6, 3 * vocabulary**0.5 * 2**-24))


@pytest.mark.parametrize("vocabulary", [5, 43, 1001, 32000])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_more_threads(vocabulary: int) -> None:
    logits = logits_of((9, vocabulary))
    together = [part.copy() for part in Ranking(2).best(logits, 3)]
    for row in range(9):
        for part, alone in zip(together, Ranking(1).best(logits[row : row + 1].copy(), 3), strict=True):
            np.testing.assert_array_equal(part[row], alone[0])


def test_what_was_bound_is_read_again_and_other_logits_are_not_mistaken_for_it() -> None:
    ranking = Ranking(1)
    logits = logits_of((2, 50))
    for place in (7, 3):  # written to where they are
        logits[:, place] = 100 - place
        assert ranking.best(logits, 1)[1].tolist() == [[place]] * 2
    assert ranking.best(logits[:1], 1)[1].tolist() == [[3]]
    assert ranking.best(logits[:, ::2], 1)[1].tolist() == [[int(row[::2].argmax())] for row in logits]
    assert ranking.best(logits, 2)[1].tolist() == [[3, 7]] * 2
    del logits
    for seed in range(20):  # memory that was given back is given out again
        other = np.random.default_rng(seed).standard_normal((2, 50)).astype(np.float32)
        assert ranking.best(other, 2)[1].tolist() == np.argsort(-other, axis=1)[:, :2].tolist()


def test_the_graph_that_is_shipped_is_the_one_that_is_described() -> None:
    assert PATH.read_bytes() == ranking_graph().SerializeToString()
