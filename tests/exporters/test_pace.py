"""The stop-watch without its clock: what is timed, in which order, and what counts as slower."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from exporters import pace
from exporters.graph import signature_of
from runtime.session import Session
from runtime.statistics import Estimate

from ..helpers import gemm_model


def measured(ratio: float, low: float | None, high: float | None) -> pace.Pace:
    return pace.Pace("batch=1", Estimate(1.0, None, None), Estimate(ratio, None, None), Estimate(ratio, low, high))


def test_slower_means_that_the_whole_interval_is_beyond_the_noise() -> None:
    assert measured(1.2, 1.1, 1.3).slower
    assert not measured(1.2, 0.9, 1.5).slower
    assert not measured(1.02, 1.01, 1.03).slower
    assert not measured(1.2, None, None).slower


def test_faster_means_that_the_whole_interval_is_clearly_below_one() -> None:
    assert measured(0.9, 0.85, 0.95).faster
    assert not measured(0.9, 0.8, 1.01).faster
    assert not measured(0.989, 0.984, 0.995).faster  # seen of a graph against itself
    assert not measured(0.9, None, None).faster


def test_both_graphs_take_turns_and_the_ratio_is_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[Session] = []

    def turn(session: Session, feeds: Any, clock: str) -> float:
        assert clock == "cpu"
        turns.append(session)
        return 10.0 if session in firsts else 13.0

    firsts: list[Session] = []
    made: list[Session] = []

    class Recorded(Session):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            (firsts if arguments[0] == data else made).append(self)

    before, after = gemm_model(0), gemm_model(1)
    data = before.SerializeToString()
    monkeypatch.setattr(pace, "_turn", turn)
    monkeypatch.setattr(pace, "Session", Recorded)
    (result,) = pace.compare_pace(
        before, after, signature_of(before), [({"batch": 2}, {"x": np.ones((2, 4), np.float32)})], clock="cpu"
    )
    assert (result.sizes, result.before.median, result.after.median, result.ratio.median) == ("batch=2", 10.0, 13.0, 1.3)
    assert result.slower
    assert sum(session in firsts for session in turns) == len(turns) / 2
    assert len(firsts) == len(made) == 3  # a clear result needs no more launches


def test_without_a_workload_nothing_is_launched() -> None:
    model = gemm_model()
    assert pace.compare_pace(model, model, signature_of(model), (), clock="wall") == ()


def test_an_unsteady_ratio_is_measured_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(10_000))
    monkeypatch.setattr(pace, "_turn", lambda session, feeds, clock: 10.0 + next(count) * 7 % 11)
    model = gemm_model()
    (result,) = pace.compare_pace(model, model, signature_of(model), [({}, {"x": np.ones((2, 4), np.float32)})], clock="wall")
    assert next(count) == 8 * 10 * 2
    assert result.sizes == "fixed sizes"
