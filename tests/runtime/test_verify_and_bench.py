from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.bench import BenchReport, _timing, bench, bundle_variant
from runtime.bundle import Bundle, Manifest, Tolerance, write_bundle
from runtime.errors import EdgekitError, FeedError, OptionError
from runtime.feeds import batch_of, example_feeds
from runtime.signature import GraphSignature, TensorSpec
from runtime.statistics import Estimate
from runtime.verify import compare, verify_bundle

from ..helpers import make_model


def test_the_goldens_of_a_fresh_bundle_agree(bundle: Path) -> None:
    report = verify_bundle(bundle)
    assert report
    assert len(report.comparisons) == 3
    assert report.to_json()["passed"] is True
    assert report.lines()[-1].startswith("verified: 3 of 3")


def test_a_graph_that_answers_otherwise_is_not_verified(bundle: Path) -> None:
    """Same files, right hashes, wrong weights: only replaying notices."""
    from ..helpers import gemm_model

    opened = Bundle.open(bundle)
    files: dict[str, bytes | Path] = {name: bundle / name for name in opened.manifest.files}
    files["model.onnx"] = gemm_model(seed=1).SerializeToString()
    write_bundle(bundle.parent / "wrong.bundle", opened.manifest, files)
    report = verify_bundle(bundle.parent / "wrong.bundle")
    assert not report
    assert "needs a tolerance of" in "\n".join(report.lines())
    assert report.lines()[-1].startswith("NOT verified")


@pytest.mark.parametrize(
    ("actual", "reference", "problem"),
    [
        (np.zeros((2, 3)), np.zeros((2, 2)), "shape"),
        (np.zeros(2, np.float32), np.zeros(2), "dtype"),
        (np.zeros(2), np.array([0, np.nan]), "reference has NaN"),
        (np.array([0, np.nan]), np.zeros(2), "NaN values came out"),
        (np.array([0, np.inf]), np.zeros(2), "needs a tolerance of inf"),
        (np.array([0, np.inf]), np.array([0, -np.inf]), "needs a tolerance of inf"),
        (np.array([0.0, 0.2]), np.zeros(2), "needs a tolerance of 2.00e-01"),
    ],
)
def test_every_kind_of_difference_is_named(actual: np.ndarray, reference: np.ndarray, problem: str) -> None:
    result = compare("g", "y", actual, reference, 0.1)
    assert not result
    assert problem in str(result.problem)


def test_the_same_infinities_agree() -> None:
    assert compare("g", "y", np.array([-np.inf, 1.0]), np.array([-np.inf, 1.0]), 0.0)


def test_an_empty_output_agrees_with_an_empty_one() -> None:
    assert compare("g", "y", np.zeros((0, 3)), np.zeros((0, 3)), 0.0)


def test_a_benchmark_measures_every_variant_at_every_batch(bundle: Path) -> None:
    variants = [bundle_variant(bundle, name=name, threads=1) for name in ("a", "b")]
    seen: list[tuple[int, int]] = []
    report = bench(
        variants, batches=(1, 4), threads=1, rounds=4, launches=2, turn_seconds=0.002, progress=lambda *step: seen.append(step)
    )
    assert [(timing.variant, timing.batch) for timing in report.timings] == [("a", 1), ("b", 1), ("a", 4), ("b", 4)]
    first, second = report.timing("a", 1), report.timing("b", 1)
    assert first.ratio is None
    assert second.ratio is not None
    assert first.rounds + first.disturbed == 8
    assert first.calls >= 8
    assert 0 < first.latency.low <= first.latency.median <= first.latency.high
    assert first.throughput == pytest.approx(1e6 / first.latency.median)
    footprint = report.footprint("a")
    assert footprint.file_bytes == Bundle.open(bundle).graph_bytes
    assert footprint.peak_bytes > footprint.model_bytes >= 0
    assert footprint.cold_start_ms > footprint.load_ms > 0
    assert seen[-1] == (16, 16)
    assert report.to_json()["timings"][1]["ratio"]["median"] == second.ratio.median


def test_rounds_in_which_something_slowed_the_first_do_not_count() -> None:
    """A quarter of the rounds are slow, for the second less than for the first: 0.9 is not half of what it takes."""
    rounds = [(100.0, 50.0)] * 30 + [(200.0, 180.0)] * 10
    turns = [[[int(1000 * pair[place])] * 3 for pair in rounds] for place in (0, 1)]
    first, second = (_timing(name, 1, turn, turns[0], is_first=name == "a") for name, turn in zip("ab", turns, strict=True))
    assert (first.rounds, first.disturbed, first.latency.median) == (30, 10, 100.0)
    assert second.ratio == Estimate(0.5, 0.5, 0.5)
    assert (second.latency.median, second.calls) == (50.0, 120)
    report = BenchReport((first, second), (), threads=1, busy=0.0)
    assert report.warning == "something slowed this machine in 25 % of the rounds; medians and ratios are of the others"
    few = [turn[:3] + turn[-5:] for turn in turns]
    assert _timing("b", 1, few[1], few[0], is_first=False).rounds == 8, "too few are left to tell"


def test_a_launch_whose_time_is_up_ends_after_seven_rounds(bundle: Path) -> None:
    variants = [bundle_variant(bundle, name=name, threads=1) for name in ("a", "b")]
    report = bench(variants, threads=1, rounds=50, launches=1, turn_seconds=0.001, seconds=0.0)
    assert [timing.rounds + timing.disturbed for timing in report.timings] == [7, 7]
    assert (ratio := report.timing("b", 1).ratio) is not None
    assert ratio.low is not None


def test_a_worker_that_cannot_open_its_bundle_says_why(bundle: Path) -> None:
    variant = bundle_variant(bundle, threads=1)
    (bundle / "model.onnx").write_bytes(b"broken")
    with pytest.raises(EdgekitError, match=r"cannot benchmark 'gemm': model.onnx"):
        bench([variant], threads=1, rounds=1)


def test_workers_do_not_import_from_the_users_folder(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("runtime", "json", "toolkit"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported by mistake')")
    monkeypatch.chdir(tmp_path)
    report = bench([bundle_variant(bundle, threads=1)], threads=1, rounds=1, launches=1)
    assert report.footprints[0].device == "cpu"


def test_a_graph_with_a_fixed_batch_can_be_timed(tmp_path: Path) -> None:
    from exporters.adopt import adopt

    from ..helpers import gemm_model, save

    model = gemm_model(inputs={"x": (1, [5, 4])}, outputs={"y": (1, [5, 3])})
    path = adopt(save(model, tmp_path / "f.onnx"), tmp_path / "f.bundle").bundle.root
    variant = bundle_variant(path, threads=1)
    assert bench([variant], batches=(5,), threads=1, rounds=1, launches=1).timings[0].batch == 5
    with pytest.raises(EdgekitError, match="fixed batch of 5; batch 1 cannot be run"):
        bench([variant], batches=(1,), threads=1, rounds=1, launches=1)


def test_impossible_benchmarks_are_refused(bundle: Path) -> None:
    variant = bundle_variant(bundle, threads=1)
    with pytest.raises(OptionError, match="at least one variant"):
        bench([], threads=1)
    with pytest.raises(OptionError, match="same name"):
        bench([variant, variant], threads=1)


def test_feeds_are_repeated_or_cut_along_the_batch_axis() -> None:
    signature = GraphSignature((TensorSpec("x", "float32", ("batch", 2)), TensorSpec("h", "float32", (1, "batch", 2))), ())
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(3, 2), "h": np.arange(6, dtype=np.float32).reshape(1, 3, 2)}
    grown = batch_of(signature, feeds, 5)
    assert grown["x"].shape == (5, 2)
    assert grown["h"].shape == (1, 5, 2)
    np.testing.assert_array_equal(grown["x"][3], feeds["x"][0])
    fixed = GraphSignature((TensorSpec("x", "float32", (3, 2)),), ())
    with pytest.raises(FeedError, match="fixed batch of 3"):
        batch_of(fixed, {"x": feeds["x"]}, 5)
    assert batch_of(fixed, {"x": feeds["x"]}, 3)["x"].shape == (3, 2)


def test_example_feeds_have_the_asked_sizes() -> None:
    signature = GraphSignature((TensorSpec("x", "float32", ("batch", 2)), TensorSpec("i", "int64", ("batch",))), ())
    feeds = example_feeds(signature, {"batch": 4})
    assert feeds["x"].shape == (4, 2)
    assert not feeds["i"].any()


def test_the_manifest_records_how_a_tolerance_was_derived(bundle: Path) -> None:
    manifest: Manifest = Bundle.open(bundle).manifest
    tolerance: Tolerance = manifest.tolerance["model"]["y"]
    assert tolerance.allowed >= tolerance.measured >= 0
    assert "10 x the larger of" in tolerance.derived


def test_make_model_is_valid() -> None:
    import onnx

    onnx.checker.check_model(make_model([onnx.helper.make_node("Identity", ["x"], ["y"])], outputs={"y": (1, ["batch", 4])}))
