"""Ranges from distributions, compared with what all values at once would give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from architectures.settings import apply_settings
from exporters.calibration import BINS, Activations, histogram
from exporters.quantizers import SCHEMES
from exporters.quantizers.ranges import METHODS, entropy_range, mse_range, percentile_range, ranges_of
from exporters.quantizers.static_settings import StaticSettings
from runtime.errors import DataError, OptionError

Array = np.ndarray[Any, Any]


def of(values: Array, samples: int = 100) -> Activations:
    values = values.astype(np.float32)
    low, high = float(values.min()), float(values.max())
    zeros = int((values == 0).sum())
    return Activations(low, high, values.size, samples, values.ndim, counts=histogram(values, low, high), zeros=zeros)


def normal(count: int = 200_000, outlier: float | None = None) -> Array:
    values = np.random.default_rng(0).standard_normal(count)
    return values if outlier is None else np.append(values, outlier)


def rounding_error(values: Array, ends: tuple[float, float]) -> float:
    """The mean square error of really quantizing all values to eight bits in a range."""
    low, high = min(ends[0], 0.0), max(ends[1], 0.0)
    scale = (high - low) / 255
    zero = np.rint(-low / scale)
    numbers = np.clip(np.rint(values / scale) + zero, 0, 255)
    return float(np.mean((values - (numbers - zero) * scale) ** 2))


@pytest.mark.parametrize("percent", [99.0, 99.9, 99.99])
def test_a_percentile_is_that_of_all_values_within_a_bin(percent: float) -> None:
    values = normal()
    low, high = percentile_range(of(values), percent)
    width = (values.max() - values.min()) / BINS
    tail = (100 - percent) / 2
    assert (low, high) == pytest.approx((np.percentile(values, tail), np.percentile(values, 100 - tail)), abs=2 * width)


def test_the_range_of_least_square_error_is_near_the_best_there_is() -> None:
    for values in (normal(), normal(outlier=30.0), np.maximum(normal(outlier=-30.0), 0), np.abs(normal(outlier=12.0))):
        found = rounding_error(values, mse_range(of(values)))
        cuts = np.linspace(0.02, 1, 400) * np.abs(values).max()
        best = min(rounding_error(values, (max(values.min(), -cut), min(values.max(), cut))) for cut in cuts)
        assert found <= 1.1 * best
        assert found <= rounding_error(values, (values.min(), values.max()))


def test_an_outlier_stretches_the_range_of_extremes_alone() -> None:
    """One value of 100 among 200,000 normal ones. Its square error counts, so that `mse` still reaches for it."""
    ends = {method: ranges_of({"x": of(normal(outlier=100.0))}, method, 99.99)["x"] for method in METHODS}
    assert ends["minmax"][1] == pytest.approx(100.0)
    assert ends["percentile"][1] < 5
    assert ends["entropy"][1] < 25
    assert ends["mse"][1] < 85
    assert all(low < -3 for low, _ in ends.values())


def test_even_values_keep_their_whole_range() -> None:
    values = np.random.default_rng(0).uniform(-1, 1, 200_000)
    for find in (entropy_range, mse_range):
        assert find(of(values)) == pytest.approx((-1.0, 1.0), abs=0.02)


def test_entropy_gives_up_a_thin_tail() -> None:
    values = np.random.default_rng(0).standard_t(3, 400_000)
    low, high = entropy_range(of(values))
    assert 3 < high < 0.7 * values.max()
    assert 0.7 * values.min() < low < -3


def test_entropy_counts_what_it_gives_up() -> None:
    """Two values in a hundred are far off, evenly spread: to cut them all off would cost more than coarser steps."""
    random = np.random.default_rng(0)
    for side in (1, -1):
        values = side * np.concatenate([random.uniform(0, 1, 196_000), random.uniform(1, 4, 4_000)])
        assert max(map(abs, entropy_range(of(values)))) > 2


def test_a_range_has_zero_in_it() -> None:
    for values in (normal() + 50, normal() - 50):
        for method in ("minmax", "percentile", "mse", "entropy"):
            low, high = ranges_of({"x": of(values)}, method, 99.99)["x"]
            assert low <= 0 <= high
            assert high - low > 45


def test_a_tensor_of_one_value_has_a_range() -> None:
    for method in ("minmax", "percentile", "mse", "entropy"):
        assert ranges_of({"x": of(np.full(20_000, 3.0))}, method, 99.99)["x"] == pytest.approx((0.0, 3.0))
        assert ranges_of({"x": of(np.zeros(20_000))}, method, 99.99)["x"] == (0.0, 0.0)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "percentile",
            "ranges=percentile needs 1000 calibration samples and there are 64: 'x' has 640 values in them, and 10000",
        ),
        ("entropy", "ranges=entropy needs 410 calibration samples and there are 64: 'x' has 640 values in them, and 4096"),
        ("mse", "ranges=mse needs 410 calibration samples and there are 64"),
    ],
)
def test_too_few_samples_are_refused_with_how_many_it_takes(method: str, message: str) -> None:
    with pytest.raises(DataError, match=f"{message}.*pass more with --data, or use --set ranges=minmax"):
        ranges_of({"x": of(normal(640), samples=64)}, method, 99.99)
    assert ranges_of({"x": of(normal(640), samples=64)}, "minmax", 99.99)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranges": "max"}, "setting 'ranges' is 'max', expected one of: minmax, percentile, entropy, mse; e.g. --set"),
        ({"types": "u8u8"}, "setting 'types' is 'u8u8', expected one of: u8s8, s8s8"),
        ({"reduce_range": "true"}, "setting 'reduce_range' is 'true', expected one of: auto, always, never"),
        ({"per_channel": "some"}, "setting 'per_channel' is 'some', expected true or false"),
        ({"ranges": "percentile", "percentile": "100"}, "'percentile' is 100, expected 50 or more and less than 100"),
        ({"percentile": "99"}, "'percentile' is for ranges=percentile, and ranges is minmax; add --set ranges=percentile"),
    ],
)
def test_settings_that_do_not_exist_or_contradict_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        apply_settings(SCHEMES["int8-static"].settings, settings)


def test_settings_come_from_the_command_line_as_text() -> None:
    given = {"ranges": "percentile", "percentile": "99.5", "per_channel": "no", "types": "s8s8", "reduce_range": "auto"}
    expected = StaticSettings("percentile", 99.5, False, "s8s8", "auto")
    assert apply_settings(SCHEMES["int8-static"].settings, given) == expected
