"""Metrics, statistics and the machine's description."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import machine
from runtime.metrics import METRICS, accuracy, agreement, mean_squared_error
from runtime.statistics import estimate, median, percentiles, quantile, undisturbed


def test_metrics_equal_scikit_learns() -> None:
    from sklearn.metrics import accuracy_score
    from sklearn.metrics import mean_squared_error as sklearn_mse

    random = np.random.default_rng(0)
    logits, labels = random.standard_normal((50, 4)), random.integers(0, 4, 50)
    assert accuracy(logits, labels) == pytest.approx(100 * accuracy_score(labels, logits.argmax(-1)))
    values, targets = random.standard_normal((50, 1)), random.standard_normal(50)
    assert mean_squared_error(values, targets) == pytest.approx(sklearn_mse(targets, values[:, 0]))


def test_agreement_is_100_only_for_equality() -> None:
    reference = np.array([3.0, 4.0])
    assert agreement(reference, reference) == 100
    assert agreement(reference * 1.01, reference) == pytest.approx(99)
    assert agreement(np.zeros(2), np.zeros(2)) == 100
    assert agreement(np.ones(2), np.zeros(2)) == 0


def test_a_drop_is_a_loss_whichever_direction_is_better() -> None:
    assert METRICS["classification"].drop(98.0, 97.5) == pytest.approx(0.5)
    assert METRICS["regression"].drop(100.0, 102.0) == pytest.approx(2.0)
    assert METRICS["regression"].drop(100.0, 90.0) == pytest.approx(-10.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_median_and_quantile_equal_numpys(values: list[float]) -> None:
    assert median(values) == pytest.approx(float(np.median(values)))
    assert quantile(values, 0.9) == pytest.approx(float(np.quantile(values, 0.9)))
    found = estimate(values)
    assert (found.low is None) == (len(values) < 6)
    if found.low is not None and found.high is not None:
        assert found.low <= found.median <= found.high


def test_the_interval_covers_the_true_median_about_95_times_in_100() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        found = estimate(random.exponential(size=40).tolist())
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= np.log(2) <= found.high
    assert 930 <= covered <= 990


def test_times_beyond_a_tenth_of_the_fast_ones_are_disturbed() -> None:
    assert undisturbed([70.0] * 8 + [76.0, 78.0, 88.0]) == [True] * 9 + [False] * 2
    assert undisturbed([88.0] * 5, known=[70.0] * 5) == [False] * 5
    assert undisturbed([50.0] + [70.0] * 20) == [True] * 21, "a single fast one is chance"


def test_no_percentile_without_enough_samples() -> None:
    assert percentiles([1.0] * 99) == {}
    assert list(percentiles([1.0] * 100)) == ["p90"]
    assert list(percentiles([1.0] * 200)) == ["p90", "p95"]
    assert list(percentiles([1.0] * 10000)) == ["p90", "p95", "p99", "p99.9"]


def test_the_machine_is_described() -> None:
    about = machine.describe_machine()
    assert about["onnxruntime"]
    assert about["available_cores"] >= 1
    assert machine.peak_resident_bytes() >= machine.resident_bytes() // 2 > 1_000_000
