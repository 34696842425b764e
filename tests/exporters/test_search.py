"""`--scheme auto`. Latencies are made up here from what a graph holds: whether int8 is faster is this machine's affair."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import exporters.search
from exporters.adopt import adopt
from exporters.candidates import Candidate, Laboratory, Measured, Setting, _recalled
from exporters.graph import read_model
from exporters.journal import Journal
from exporters.preference import Preference
from exporters.quantize import Budget, Quality
from exporters.quantized_graphs import Part
from exporters.race import Speed
from exporters.search import SearchReport, front, search
from exporters.sensitivity import sensitivity
from runtime.bench_worker import Variant
from runtime.bundle import Bundle
from runtime.errors import OutputExists, QuantizationRefused
from runtime.metrics import METRICS
from runtime.session import Session
from runtime.statistics import Estimate
from runtime.verify import verify_bundle

from ..helpers import make_model, save
from .recurrent_models import Case

WIDTH = 64


def three_products(outlier: bool) -> onnx.ModelProto:
    """With `outlier` the second weight has a row so large that int8 loses all others; it only ever multiplies zeros."""
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for name in "abc"}
    if outlier:
        weights["a"][:, 0] = 0.0
        weights["b"][0] = 300.0
    nodes = []
    for name, read, made in (("a", "x", "h"), ("b", "g", "i"), ("c", "i", "y")):
        nodes.append(onnx.helper.make_node("MatMul", [read, name], [made], name=f"product.{name}"))
        if name == "a":
            nodes.append(onnx.helper.make_node("Relu", ["h"], ["g"], name="relu"))
    shape = (TensorProto.FLOAT, ["batch", WIDTH])
    return make_model(nodes, weights, inputs={"x": shape}, outputs={"y": shape})


def samples() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((32, WIDTH)).astype(np.float32)}


def bundle_of(folder: Path, *, outlier: bool = False) -> Bundle:
    return adopt(save(three_products(outlier), folder / "net.onnx"), folder / "net.bundle").bundle


def agreement_with(bundle: Bundle) -> Quality:
    def answer(variant: Bundle) -> Any:
        return Session(variant.graph_path(), variant.graph()[1].signature, device="cpu").run(samples())["y"]

    reference = answer(bundle)
    return Quality(METRICS["tensors"], lambda variant: METRICS["tensors"].compute(answer(variant), reference), "samples")


def made_up_latency(bundle: Bundle) -> float:
    """A product in float32 takes 1, in int8 0.4, in 4 bits 0.6; stored in 16 bits it is float32 again. A GRU takes 5, and 2 in
    steps."""
    cost = {"MatMul": 1.0, "Gemm": 1.0, "MatMulInteger": 0.4, "MatMulNBits": 0.6, "QLinearMatMul": 0.4, "GRU": 5.0, "Scan": 2.0}
    return sum(cost.get(node.op_type, 0.0) for node in read_model(bundle.graph_path()).graph.node)


@pytest.fixture(autouse=True)
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimate(before: Bundle, after: Bundle) -> Estimate:
        ratio = made_up_latency(after) / made_up_latency(before)
        return Estimate(ratio, ratio * 0.999, ratio * 1.001)

    def race(self: Laboratory, bundle: Bundle) -> Estimate:
        return estimate(self.setting.bundle, bundle)

    def speeds(before: Bundle, after: Sequence[Bundle], batch: int, counts: Sequence[int]) -> list[Speed]:
        ratios = [estimate(before, bundle) for bundle in after]
        noise = Estimate(1.0, 0.99, 1.01)
        return [Speed(ratio, noise, 100.0, 100.0 * ratio.median, batch, counts[0], counts[0]) for ratio in ratios]

    monkeypatch.setattr(Laboratory, "race", race)
    monkeypatch.setattr(Laboratory, "start_original", lambda self: None)
    monkeypatch.setattr("exporters.search.measure_speeds", speeds)
    monkeypatch.setattr("exporters.quantize._refuse_unrunnable", lambda *_: None)  # a process for each takes long


def searched(bundle: Bundle, target: Path | str, **options: Any) -> SearchReport:
    options = {"calibration": lambda graph: iter([samples()]), "quality": agreement_with(bundle), "threads": 1} | options
    return search(bundle, target, **options)


def test_the_best_within_the_budget_is_written_and_verifies(tmp_path: Path) -> None:
    found = searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=3.0))
    assert found.report
    assert found.report.drop <= 3.0
    fitting = [item for item in found.tried if item.problem is None and item.drop <= 3.0]
    fastest = min(item.ratio.median for item in fitting)
    assert found.report.latency_ratio.median <= fastest * 1.03
    assert verify_bundle(tmp_path / "q.bundle")
    assert found.chosen in found.front
    assert not list(tmp_path.glob("*.search.json"))


def test_for_size_the_smallest_is_chosen(tmp_path: Path) -> None:
    found = searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=25.0, for_size=True))
    fitting = [item for item in found.tried if item.problem is None and item.drop <= 25.0]
    assert found.report.bytes_after <= min(item.bytes for item in fitting) * 1.005


def test_a_node_that_costs_too_much_is_left_out_and_the_rest_is_quantized(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, outlier=True)
    errors = sensitivity(bundle, Part("int8-static"), ["product.a", "product.b", "product.c"], lambda graph: iter([samples()]))
    assert max(errors, key=lambda label: errors[label]) == "product.b"
    alone = {item.label: item for item in searched(bundle, tmp_path / "q.bundle", budget=Budget(max_drop=4.0)).tried}
    assert any("without" in label and item.drop <= 4.0 for label, item in alone.items())


def test_a_recurrent_layer_is_also_tried_in_the_arithmetic_that_its_size_does_not_suggest(tmp_path: Path) -> None:
    model = Case("GRU", initial=False, outputs="last").model()
    bundle = adopt(save(model, tmp_path / "net.onnx"), tmp_path / "net.bundle").bundle
    always = Quality(METRICS["tensors"], lambda variant: 100.0, "nothing")
    found = search(bundle, tmp_path / "q.bundle", quality=always, threads=1)
    assert {"int8-weights", "int8-weights (recurrence=int8)"} <= {item.label for item in found.tried}
    assert "recurrence=int8" in found.chosen


def test_every_scheme_is_tried_before_any_with_other_settings(tmp_path: Path) -> None:
    found = searched(bundle_of(tmp_path, outlier=True), tmp_path / "q.bundle", budget=Budget(max_drop=4.0))
    labels = [item.label for item in found.tried if " + " not in item.label and "without" not in item.label]
    others = [label for label in labels if "(" in label and label != "fp16 (arithmetic=float32)"]
    assert others
    assert labels[-len(others) :] == others


def test_of_a_decoder_schemes_for_weights_are_tried_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporters.exploration.DECODER", "model")  # as the only graph is called
    found = searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=25.0), seconds=0.0)
    assert [item.label for item in found.tried] == ["int4-weights"]


def test_a_scheme_that_lacks_samples_is_named(tmp_path: Path) -> None:
    found = searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=3.0), calibration=None)
    problems = {item.label: item.problem for item in found.tried if item.problem}
    assert problems == {"int8-static": "it needs samples to calibrate on; pass them with --data"}
    assert "int8-static" not in found.front


def test_every_node_has_its_scheme_and_a_reason(tmp_path: Path) -> None:
    found = searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=3.0))
    assert {node.node for node in found.nodes} >= {"product.a", "product.b", "product.c"}
    assert all(node.reason for node in found.nodes)
    assert all(node.scheme for node in found.nodes if node.quantized)


def test_a_budget_that_nothing_meets_is_refused_with_the_nearest_miss(tmp_path: Path) -> None:
    with pytest.raises(
        QuantizationRefused, match=r"nothing of \d+ that were measured is within the budget; the nearest miss is"
    ):
        searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=0.5, max_bytes=100))
    assert not list(tmp_path.glob("q.bundle*"))


def test_a_refusal_for_want_of_time_names_the_schemes_that_were_not_tried(tmp_path: Path) -> None:
    with pytest.raises(
        QuantizationRefused, match="time was up before these were tried: int8-weights, .*; give it more with --time"
    ):
        searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_bytes=100), seconds=0.0)


def measured(label: str, size: int, ratio: float, drop: float = 0.0) -> tuple[Candidate, Measured]:
    return Candidate(label, (Part(label),)), Measured(label, size, Estimate(ratio, ratio - 0.02, ratio + 0.02), 0.0, drop)


def best_of(*tried: tuple[Candidate, Measured], **budget: Any) -> str:
    return Preference(Budget(**budget), allowed=1.0).ranked(tried)[0][0].label


def test_the_fastest_is_the_best_and_of_equally_fast_ones_the_smallest() -> None:
    fast, small, slow = measured("fast", 100, 0.50), measured("small", 60, 0.51), measured("slow", 10, 0.60)
    assert best_of(slow, fast, small) == "small"
    assert best_of(slow, fast) == "fast"
    assert best_of(slow, fast, small, for_size=True) == "slow"


def test_a_few_bytes_do_not_make_up_for_speed() -> None:
    assert best_of(measured("fast", 1000, 0.50), measured("smaller by a trifle", 999, 0.51)) == "fast"
    assert best_of(measured("small", 999, 0.60), measured("fast", 1000, 0.50), for_size=True) == "fast"


def test_where_the_machine_is_disturbed_speeds_that_cannot_be_told_apart_are_decided_by_size() -> None:
    def item(label: str, size: int, ratio: float, width: float) -> tuple[Candidate, Measured]:
        return Candidate(label, (Part(label),)), Measured(label, size, Estimate(ratio, ratio - width, ratio + width))

    assert best_of(item("large", 200, 0.94, 0.05), item("small", 100, 1.02, 0.05)) == "small"
    assert best_of(item("large", 200, 0.94, 0.01), item("small", 100, 1.02, 0.01)) == "large"
    assert best_of(item("large", 200, 0.94, 0.001), item("small", 100, 0.96, 0.001)) == "small", "these are equally fast"
    assert best_of(item("large", 200, 0.80, 0.50), item("small", 100, 1.02, 0.50)) == "large", "no machine is so disturbed"


def test_a_mix_that_cannot_be_told_from_a_scheme_alone_gives_way_to_it() -> None:
    part = Part("int8-static", nodes=frozenset(["a"]))
    mix = Candidate("mix", (part, part)), Measured("mix", 1000, Estimate(0.50, 0.45, 0.56))
    assert best_of(mix, measured("alone", 1000, 0.54)) == "alone"
    assert best_of(mix, measured("alone", 1000, 0.57)) == "mix", "more than a machine's noise slower"
    assert best_of(mix, measured("alone", 1010, 0.50)) == "mix", "it is smaller"
    assert best_of(mix, measured("alone", 1010, 0.48)) == "alone", "the mix looks slower"
    assert best_of(mix, measured("alone", 1010, 0.48), for_size=True) == "mix"
    fastest = Candidate("fastest", (part,)), Measured("fastest", 1100, Estimate(0.42, 0.40, 0.46))
    assert best_of(fastest, mix, measured("alone", 1000, 0.54)) == "fastest", "the scheme alone is not as fast as that"


@pytest.mark.parametrize(
    ("budget", "fits"),
    [
        ({}, True),
        ({"max_bytes": 99}, False),
        ({"max_ratio": 0.7}, False),
        ({"max_ratio": 0.75}, True),  # 0.8 ± 0.02 may be 0.75 by a quick race's noise
        ({"max_us": 70.0}, False),
        ({"max_us": 70.0, "for_size": True}, False),
    ],
)
def test_what_is_clearly_outside_the_budget_is_not_raced_again(budget: dict[str, Any], fits: bool) -> None:
    assert Preference(Budget(**budget), allowed=1.0).may_fit(measured("x", 100, 0.8)[1], original_us=100.0) is fits


def test_what_loses_too_much_never_fits() -> None:
    assert not Preference(Budget(for_size=True), allowed=1.0).may_fit(measured("x", 1, 0.1, drop=1.1)[1])
    assert not Preference(Budget(for_size=True), allowed=1.0).may_fit(measured("x", 1, 0.1, drop=float("nan"))[1])


def misled_by(monkeypatch: pytest.MonkeyPatch, quick: Callable[[Bundle, float], float]) -> None:
    """Quick races give `quick(candidate, its true ratio)`; the last one tells the truth."""

    def race(self: Laboratory, bundle: Bundle) -> Estimate:
        ratio = quick(bundle, made_up_latency(bundle) / made_up_latency(self.setting.bundle))
        return Estimate(ratio, ratio * 0.9, ratio * 1.1)

    monkeypatch.setattr(Laboratory, "race", race)


def test_a_scheme_alone_that_a_quick_race_wronged_still_wins_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    misled_by(monkeypatch, lambda bundle, ratio: 0.7 if bundle.manifest.precision == "int8-dynamic" else ratio)
    found = searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=3.0))
    truth = {item.label: item.ratio.median for item in found.raced}
    assert min(found.tried, key=lambda item: item.ratio.median).label != "int8-dynamic"
    assert found.chosen == "int8-dynamic"
    assert truth[found.chosen] <= min(truth.values()) * 1.03
    assert found.report.latency_ratio.median == truth[found.chosen]


def test_where_the_best_do_not_pass_the_gate_every_scheme_alone_is_raced_before_anything_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raced: list[list[str]] = []

    def speeds(before: Bundle, after: Sequence[Bundle], batch: int, counts: Sequence[int]) -> list[Speed]:
        raced.append([bundle.manifest.precision for bundle in after])
        ratios = [1.0 if bundle.manifest.precision == "fp16" else 2.0 for bundle in after]
        even = Estimate(1.0, 1.0, 1.0)
        return [Speed(Estimate(ratio, ratio, ratio), even, 1.0, ratio, batch, counts[0], counts[0]) for ratio in ratios]

    misled_by(monkeypatch, lambda bundle, ratio: 1.05 if bundle.manifest.precision == "fp16" else 0.5)
    monkeypatch.setattr("exporters.search.measure_speeds", speeds)
    monkeypatch.setattr("exporters.search._FINALISTS", 2)
    found = searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=3.0))
    assert "fp16" not in raced[0]
    assert found.report.scheme == "fp16"
    assert verify_bundle(tmp_path / "q.bundle")


def test_if_nothing_passes_the_last_race_the_nearest_miss_is_told_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speeds(before: Bundle, after: Sequence[Bundle], batch: int, counts: Sequence[int]) -> list[Speed]:
        return [Speed(Estimate(2.0, 1.9, 2.1), Estimate(1.0, 1.0, 1.0), 1.0, 2.0, batch, counts[0], counts[0]) for _ in after]

    monkeypatch.setattr("exporters.search.measure_speeds", speeds)
    with pytest.raises(
        QuantizationRefused, match=r"nothing of \d+ passed the last race; the nearest miss is .*: 2\.00 times slower"
    ):
        searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=3.0))
    assert not (tmp_path / "q.bundle").exists()


def test_a_search_that_was_cut_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = bundle_of(tmp_path)
    measured: list[str] = []
    original = Laboratory._measured

    def cut(self: Laboratory, candidate: Any) -> Measured:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(candidate.label)
        return original(self, candidate)

    monkeypatch.setattr(Laboratory, "_measured", cut)
    with pytest.raises(KeyboardInterrupt):
        searched(bundle, tmp_path / "q.bundle", budget=Budget(max_drop=3.0))
    assert not (tmp_path / "q.bundle").exists()
    assert len(json.loads((tmp_path / "q.bundle.search.json").read_text())["measured"]) == 3
    again: list[str] = []
    monkeypatch.setattr(Laboratory, "_measured", lambda self, item: again.append(item.label) or original(self, item))  # type: ignore[func-returns-value]
    found = searched(bundle, tmp_path / "q.bundle", budget=Budget(max_drop=3.0))
    assert found.recalled == 3
    assert not set(again) & set(measured)
    monkeypatch.setattr(Laboratory, "_measured", original)
    assert searched(bundle, tmp_path / "other.bundle", budget=Budget(max_drop=3.0)).chosen == found.chosen


def test_another_bundle_does_not_go_on_from_the_journal_of_this_one(tmp_path: Path) -> None:
    journal = tmp_path / "q.bundle.search.json"
    Journal(journal, {"bundle": "another"}).write({"x": {}})
    assert searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=3.0)).recalled == 0


@pytest.mark.parametrize("content", ["", "mine", "{}", '{"kind": "other", "measured": {}}', "[]", "[" * 100_000])
def test_a_file_in_the_journal_s_place_that_is_not_one_is_left_alone(content: str, tmp_path: Path) -> None:
    mine = tmp_path / "q.bundle.search.json"
    mine.write_text(content)
    with pytest.raises(OutputExists, match=r"q\.bundle\.search\.json .* was not written by it; move it away"):
        searched(bundle_of(tmp_path), tmp_path / "q.bundle", force=True)
    assert mine.read_text() == content
    assert not (tmp_path / "q.bundle").exists()


def test_a_journal_that_somebody_changed_is_begun_anew(tmp_path: Path) -> None:
    journal = tmp_path / "q.search.json"
    for known in ([], {"x": 1}, {"x": {}}, {"x": measured("x", 1, 1.0)[1].to_json() | {"bytes": "abc"}}):
        Journal(journal, {"a": 1}).write(known)  # type: ignore[arg-type]
        assert _recalled(Journal(journal, {"a": 1})) == {}


def test_what_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, original, count = bundle_of(tmp_path), Laboratory._measured, 0

    def broken(self: Laboratory, candidate: Any) -> Measured:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return Measured(candidate.label, problem="out of memory") if count == 1 else original(self, candidate)

    monkeypatch.setattr(Laboratory, "_measured", broken)
    with pytest.raises(KeyboardInterrupt):
        searched(bundle, tmp_path / "q.bundle", budget=Budget(max_drop=3.0))
    found = searched(bundle, tmp_path / "q.bundle", budget=Budget(max_drop=3.0))
    assert found.recalled == 1
    assert not [item.label for item in found.tried if item.problem == "out of memory"]


def test_a_search_that_goes_on_knows_how_long_candidates_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, now = bundle_of(tmp_path), 0.0
    monkeypatch.setattr("exporters.candidates.time.monotonic", lambda: now)
    original = Laboratory._measured

    def slow(self: Laboratory, candidate: Any) -> Measured:
        nonlocal now
        now += 10.0
        if now > 40.0:
            raise KeyboardInterrupt
        return original(self, candidate)

    monkeypatch.setattr(Laboratory, "_measured", slow)
    with pytest.raises(KeyboardInterrupt):
        searched(bundle, tmp_path / "q.bundle", budget=Budget(max_drop=30.0))
    found = searched(bundle, tmp_path / "q.bundle", budget=Budget(max_drop=30.0), seconds=5.0)
    assert found.recalled == 4
    assert len(found.raced) == 1, "a last race of more would take longer than 5 s"


def test_the_second_last_race_is_left_out_if_there_is_no_time_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, races = 0.0, []
    monkeypatch.setattr("exporters.candidates.time.monotonic", lambda: now)
    original = Laboratory._measured

    def slow(self: Laboratory, candidate: Any) -> Measured:
        nonlocal now
        now += 10.0
        return original(self, candidate)

    def speeds(before: Bundle, after: Sequence[Bundle], batch: int, counts: Sequence[int]) -> list[Speed]:
        nonlocal now
        now += 20.0 * len(after)
        races.append(len(after))
        return [Speed(Estimate(2.0, 1.9, 2.1), Estimate(1.0, 1.0, 1.0), 1.0, 2.0, batch, counts[0], counts[0]) for _ in after]

    monkeypatch.setattr(Laboratory, "_measured", slow)
    monkeypatch.setattr("exporters.search.measure_speeds", speeds)
    with pytest.raises(QuantizationRefused, match="time was up before everything was tried; give it more with --time"):
        searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=30.0), seconds=110.0)
    assert len(races) == 1


def test_one_whose_answers_turn_out_to_be_no_numbers_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = bundle_of(tmp_path)
    first = searched(bundle, tmp_path / "first.bundle", budget=Budget(max_drop=3.0))
    original = exporters.search.write_made

    def refused(bundle: Bundle, made: Any, report: Any, *rest: Any, **more: Any) -> Any:
        if report.bytes_after == first.report.bytes_after:
            raise QuantizationRefused("it answers with NaN")
        return original(bundle, made, report, *rest, **more)

    monkeypatch.setattr("exporters.search.write_made", refused)
    second = searched(bundle, tmp_path / "second.bundle", budget=Budget(max_drop=3.0))
    assert second.chosen != first.chosen
    assert verify_bundle(tmp_path / "second.bundle")


def test_the_same_file_adopted_again_goes_on_and_other_samples_of_the_same_name_do_not(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path)
    again = replace(bundle, seal="of a manifest with another time in it")

    def fingerprint(bundle: Bundle, samples: str) -> dict[str, Any]:
        return Setting(
            bundle, Quality(METRICS["tensors"], lambda _: 100.0, "x.npz", samples=samples), None, 1, (1,), False
        ).fingerprint()

    assert fingerprint(bundle, "1") == fingerprint(again, "1")
    assert fingerprint(bundle, "1") != fingerprint(bundle, "2")


@pytest.mark.parametrize("target", ["new/folder/q.bundle", "q.bundle/"])
def test_a_folder_that_is_not_there_yet_is_made_with_the_result(target: str, tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path)
    with pytest.raises(QuantizationRefused):
        searched(bundle, f"{tmp_path}/{target}", budget=Budget(max_bytes=10))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.bundle", "net.onnx"]
    searched(bundle, f"{tmp_path}/{target}", budget=Budget(max_drop=3.0))
    assert verify_bundle(tmp_path / target)
    assert not list(tmp_path.rglob("*.search.json*"))


def test_what_is_written_is_what_was_judged(tmp_path: Path) -> None:
    """A build that turns out worse than the one that was searched with is passed over."""
    bundle = bundle_of(tmp_path)
    first = searched(bundle, tmp_path / "first.bundle", budget=Budget(max_drop=3.0))
    plain, seen = agreement_with(bundle), set[int]()

    def measure(variant: Bundle) -> float:
        again = variant.graph_bytes in seen
        seen.add(variant.graph_bytes)
        return float("nan") if again and variant.graph_bytes == first.report.bytes_after else plain.measure(variant)

    quality = Quality(plain.metric, measure, plain.data)
    second = searched(bundle, tmp_path / "second.bundle", quality=quality, budget=Budget(max_drop=3.0))
    assert second.chosen != first.chosen
    assert second.report


def test_when_time_is_up_the_best_so_far_is_taken(tmp_path: Path) -> None:
    found = searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=30.0), seconds=0.0)
    assert not found.complete
    assert len(found.tried) == 1
    assert found.untried == ("int8-weights", "int8-dynamic", "int4-weights", "fp16", "bf16")


def test_a_scheme_that_need_not_be_tried_is_not_called_untried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Laboratory, "has_time_for", lambda self, count: not any("fp16" in key for key in self.results))
    found = searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=30.0))
    assert not found.complete
    assert found.untried == ()


def test_time_is_kept_for_the_last_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("exporters.candidates.time.monotonic", lambda: now)
    original = Laboratory._measured

    def slow(self: Laboratory, candidate: Any) -> Measured:
        nonlocal now
        now += 10.0
        return original(self, candidate)

    monkeypatch.setattr(Laboratory, "_measured", slow)
    found = searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=30.0), seconds=75.0)
    assert len(found.tried) == 4, "a fifth would end at 50 s, and the last race of one takes 30 s"
    assert len(found.raced) == 2


class Timed:
    """Stands for a worker: the latencies of its turns, one after the other."""

    def __init__(self, name: str, turns: list[float]) -> None:
        self.variant = bundle_less(name)
        self._turns = iter(turns)
        self.taken = 0

    def turn(self, seconds: float, core: int | None = None) -> list[int]:
        self.taken += 1
        return [int(1000 * next(self._turns))]

    def core(self) -> int | None:
        return None


def bundle_less(name: str) -> Variant:
    return Variant(name, "none", {})


def test_a_quick_race_waits_for_the_machine_to_be_quiet(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path)
    setting = Setting(bundle, Quality(METRICS["tensors"], lambda _: 100.0, "x"), None, 1, (1,), False)
    laboratory = Laboratory(setting, journal=tmp_path / "j.json", progress=lambda line: None)

    def raced(originals: list[float], candidates: list[float]) -> tuple[float, int]:
        workers = Timed("original", originals), Timed("candidate", candidates)
        return laboratory._raced(*workers).median, workers[0].taken  # type: ignore[arg-type]

    assert raced([100.0] * 99, [50.0] * 99) == (0.5, 25)
    assert raced([200.0] * 20 + [100.0] * 99, [180.0] * 20 + [50.0] * 99) == (0.5, 45), "by what was seen before"
    ratio, rounds = raced([200.0] * 99, [180.0] * 99)
    assert (ratio, rounds) == (0.9, 75), "not for ever"


def test_the_front_leaves_out_what_is_beaten_everywhere() -> None:
    def item(label: str, size: int, ratio: float, drop: float) -> Measured:
        return Measured(label, size, Estimate(ratio, None, None), 0.0, drop)

    tried = [item("a", 10, 1.0, 0.0), item("b", 5, 0.5, 1.0), item("c", 6, 0.6, 1.0), item("d", 5, 0.4, 3.0)]
    assert front([*tried, Measured("e", problem="no")]) == ("a", "b", "d")


def test_what_is_no_number_is_neither_on_the_front_nor_the_nearest_miss() -> None:
    broken, poor = measured("fp16", 10, 0.5, drop=float("nan"))[1], measured("int8", 20, 0.9, drop=50.0)[1]
    assert front([broken, poor]) == ("int8",)
    preference = Preference(Budget(), 5.0)
    assert preference.miss(poor) < preference.miss(broken)


def test_a_bundle_that_is_quantized_already_is_refused(tmp_path: Path) -> None:
    searched(bundle_of(tmp_path), tmp_path / "q.bundle", budget=Budget(max_drop=3.0))
    with pytest.raises(QuantizationRefused, match="quantize its fp32 parent instead"):
        searched(Bundle.open(tmp_path / "q.bundle"), tmp_path / "r.bundle")
