"""The gate keeps what wins and refuses what does not, with the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from exporters.adopt import adopt
from exporters.quantize import (
    Budget,
    MeasuredRefusal,
    Quality,
    QuantizeReport,
    _fine_tuning_advice,
    _threads_note,
    judge,
    quantize,
)
from exporters.quantized_graphs import convert
from exporters.quantizers import SCHEMES
from exporters.quantizers.scheme import decide, quantizable
from exporters.race import Speed, measure_speeds, thread_counts
from runtime.bundle import Bundle
from runtime.errors import OptionError, QuantizationRefused, UnknownName
from runtime.metrics import METRICS
from runtime.session import Session
from runtime.statistics import Estimate
from runtime.verify import verify_bundle

from ..helpers import gemm_model, leftovers, make_model, save

EVEN = Estimate(1.0, 0.99, 1.01)


def wide_model(width: int = 256) -> onnx.ModelProto:
    """Two large matrix products with ReLU between: what int8 is good at."""
    random = np.random.default_rng(0)
    weights = {name: (random.standard_normal((width, width)) / 16).astype(np.float32) for name in ("A", "B")}
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "B"], ["y"], name="second"),
    ]
    shape = (TensorProto.FLOAT, ["batch", width])
    return make_model(nodes, weights, inputs={"x": shape}, outputs={"y": shape})


def samples(width: int = 256, count: int = 4) -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    return ({"x": random.standard_normal((16, width)).astype(np.float32)} for _ in range(count))


@pytest.fixture
def wide(tmp_path: Path) -> Bundle:
    return adopt(save(wide_model(), tmp_path / "wide.onnx"), tmp_path / "wide.bundle").bundle


def agreement_with(bundle: Bundle) -> Quality:
    feeds = next(samples())

    def answer(variant: Bundle) -> np.ndarray:
        return Session(variant.graph_path(), variant.graph()[1].signature).run(feeds)["y"]

    return Quality(METRICS["tensors"], lambda variant: METRICS["tensors"].compute(answer(variant), answer(bundle)), "samples")


@pytest.mark.parametrize("scheme", ["int8-static", "fp16"])
def test_every_scheme_makes_it_smaller_within_its_error(scheme: str, wide: Bundle, tmp_path: Path) -> None:
    report = quantize(
        wide,
        tmp_path / "q.bundle",
        scheme=scheme,
        quality=agreement_with(wide),
        calibration=lambda graph: samples(),
        budget=Budget(for_size=True),
        threads=1,
    )
    assert report
    assert report.size_ratio < (0.52 if scheme == "fp16" else 0.3)
    assert report.metric_after > 96
    small = Bundle.open(tmp_path / "q.bundle")
    assert small.manifest.precision == scheme
    assert small.manifest.lineage[-1]["parent"] == wide.seal
    assert small.manifest.lineage[-1]["size_ratio"] == pytest.approx(report.size_ratio)
    assert verify_bundle(small.root)
    assert "when it was made" in small.manifest.tolerance["model"]["y"].derived
    with pytest.raises(QuantizationRefused, match=f"already {scheme}"):
        quantize(
            small,
            tmp_path / "r.bundle",
            scheme=scheme,
            quality=agreement_with(wide),
            calibration=lambda graph: samples(),
            threads=1,
        )


def test_a_quality_budget_that_is_not_met_is_refused_and_nothing_written(wide: Bundle, tmp_path: Path) -> None:
    with pytest.raises(MeasuredRefusal, match=r"agreement drops by .* more than the 0.001 that --max-drop allows") as caught:
        quantize(
            wide,
            tmp_path / "q.bundle",
            scheme="int8-dynamic",
            quality=agreement_with(wide),
            budget=Budget(max_drop=0.001, for_size=True),
            threads=1,
        )
    assert not caught.value.report
    assert not (tmp_path / "q.bundle").exists()
    assert leftovers(tmp_path) == []


def test_a_loss_of_quality_of_a_trained_run_advises_fine_tuning_it() -> None:
    def advice(source: dict[str, Any], scheme: str = "int8-static", drop: float = 3.0) -> str:
        lineage = ({"step": "export", "source": source}, {"step": "optimize"})
        bundle = SimpleNamespace(manifest=SimpleNamespace(lineage=lineage))
        return _fine_tuning_advice(cast(Any, bundle), cast(Any, SimpleNamespace(scheme=scheme, drop=drop, max_drop=0.5)))

    run: dict[str, Any] = {"kind": "run", "recipe": {"training": {}}}
    assert "edgekit train RUN --quantize int8-static -o NEW; then export and quantize NEW" in advice(run)
    assert "more epochs may help" in advice({"kind": "run", "recipe": {"training": {"quantize": "int8-static"}}})
    assert "--quantize int4-weights" in advice(run, "int4-weights")
    assert advice(run, "fp16") == advice(run, drop=0.1) == advice({"kind": "onnx"}) == ""


def kept(ratio: Estimate, noise: Estimate = EVEN, budget: Budget | None = None, after: float = 90.0) -> bool:
    speed = Speed(ratio, noise, 100.0, 100.0 * ratio.median, 1, 1, 1)
    return not judge(speed, METRICS["classification"], (90.0, after), 1000, budget or Budget())["refusals"]


def test_slower_means_slower_than_the_machines_own_noise() -> None:
    assert not kept(Estimate(1.10, 1.05, 1.15))
    assert kept(Estimate(1.10, 1.05, 1.15), noise=Estimate(1.02, 0.97, 1.08))
    assert kept(Estimate(1.03, 1.01, 1.05))
    assert not kept(Estimate(3.0, 2.9, 3.1), noise=Estimate(2.0, 0.5, 4.0))  # a disturbed control excuses nothing
    assert kept(Estimate(0.5, 0.4, 0.6))
    assert kept(Estimate(3.0, 2.9, 3.1), budget=Budget(for_size=True))
    assert not kept(Estimate(1.19, 0.94, 1.43))  # too wide to tell is no win
    assert kept(Estimate(1.19, 0.94, 1.43), budget=Budget(for_size=True))


def test_a_slower_result_advises_what_may_be_faster() -> None:
    def advice(scheme: str, reasons: dict[str, str], **settings: str) -> str:
        nodes = [SimpleNamespace(operator=operator, quantized=True, reason=reason) for operator, reason in reasons.items()]
        report = SimpleNamespace(refusals=("1.2 times slower",), scheme=scheme, settings=settings, nodes=nodes)
        return QuantizeReport.advice(cast(Any, report))

    layer = {"GRU": "quantized step by step: with 196608 weights", "MatMul": "chosen"}
    assert "--set recurrence=float32" in advice("int8-weights", layer)
    assert "--only MatMul, or --for-size" in advice("int8-weights", layer, recurrence="int8")
    assert "--only MatMul, or --for-size" in advice("int8-dynamic", layer)  # it has no such setting
    assert "--set arithmetic=float32" in advice("fp16", {"MatMul": "chosen"})
    assert advice("int8-static", {"Conv": "chosen"}) == "Try --for-size if only size matters. "


def test_candidates_race_in_groups_that_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def sized(size: int, precision: str) -> Any:
        return SimpleNamespace(graph_bytes=size, manifest=SimpleNamespace(precision=precision))

    races: list[list[int]] = []

    def race(before: Any, after: list[Any], batch: int, counts: tuple[int, ...]) -> list[Any]:
        races.append([item.graph_bytes for item in after])
        return [item.graph_bytes for item in after]

    monkeypatch.setattr("exporters.race._race", race)
    candidates = [sized(25, "int8-static"), sized(26, "int8-weights"), sized(50, "fp16"), sized(13, "int4-weights")]
    sizes = [25, 26, 50, 13]
    for memory, expected in {None: [sizes], 1000: [sizes], 480: [[25, 26], [50, 13]], 100: [[25], [26], [50], [13]]}.items():
        races.clear()
        monkeypatch.setattr("exporters.race.available_memory", lambda memory=memory: memory)
        assert measure_speeds(sized(100, "fp32"), candidates, 1, (1,)) == sizes
        assert races == expected
    monkeypatch.setattr("exporters.race.available_memory", lambda: 480)
    measure_speeds(sized(100, "fp32"), candidates, 1, (2, 1))  # each in two processes
    assert races[-3:] == [[25, 26], [50], [13]]


@pytest.mark.parametrize(
    ("control", "candidate", "races"),
    [
        (EVEN, EVEN, 1),
        (EVEN, Estimate(1.2, 0.9, 1.5), 2),
        (Estimate(1.2, 0.9, 1.5), EVEN, 2),
        (EVEN, Estimate(1.5, 1.4, 1.6), 1),
    ],
)
def test_a_race_that_tells_nothing_is_run_again_for_longer(
    control: Estimate, candidate: Estimate, races: int, wide: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[int] = []
    ratios = {"original": None, "control": control, "candidate 0 on 1": candidate}

    def bench(variants: Any, *, launches: int, **_: Any) -> Any:
        run.append(launches)
        return SimpleNamespace(
            timing=lambda name, batch: SimpleNamespace(
                ratio=ratios[name], latency=Estimate(9.0, 8.0, 10.0), disturbed_share=0.0
            )
        )

    monkeypatch.setattr("exporters.race.bench", bench)
    monkeypatch.setattr("exporters.race._LAUNCHES", (3, 6))
    (speed,) = measure_speeds(wide, [wide], 1, (1,))
    assert run == [3, 6][:races]
    assert (speed.ratio, speed.noise) == (candidate, control)


def timed(monkeypatch: pytest.MonkeyPatch, latencies: dict[str, float]) -> list[list[tuple[str, int]]]:
    """What every race is of, as (name, threads); each takes what is given for its name."""
    races: list[list[tuple[str, int]]] = []

    def bench(variants: Any, **_: Any) -> Any:
        races.append([(variant.name, variant.request["threads"]) for variant in variants])
        first = latencies[variants[0].name]

        def timing(name: str, batch: int) -> Any:
            ratio = latencies[name] / first
            return SimpleNamespace(
                ratio=None if name == variants[0].name else Estimate(ratio, 0.99 * ratio, 1.01 * ratio),
                latency=Estimate(latencies[name], latencies[name], latencies[name]),
                disturbed_share=0.0,
            )

        return SimpleNamespace(timing=timing)

    monkeypatch.setattr("exporters.race.bench", bench)
    monkeypatch.setattr("exporters.race.available_cpus", lambda: 2)
    monkeypatch.setattr("exporters.quantize.available_cpus", lambda: 2)
    return races


@pytest.mark.parametrize(
    ("on_two", "on_one", "counts"),
    [(100.0, 60.0, (1, 2)), (60.0, 100.0, (2, 1)), (5000.0, 4000.0, (2,))],
)
def test_short_calls_are_timed_on_all_cores_and_on_one(
    on_two: float, on_one: float, counts: tuple[int, ...], wide: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    races = timed(monkeypatch, {"2": on_two, "1": on_one})
    assert thread_counts(wide, 1, None) == counts
    assert races == [[("2", 2), ("1", 1)]]
    assert thread_counts(wide, 1, 3) == (3,), "asked for"
    monkeypatch.setattr("exporters.race._SHORT_BYTES", wide.graph_bytes - 1)
    assert thread_counts(wide, 1, None) == (2,), "too large to be short"
    monkeypatch.setattr("exporters.race.available_cpus", lambda: 1)
    assert thread_counts(wide, 1, None) == (1,)
    assert len(races) == 1


@pytest.mark.parametrize(
    ("on_two", "on_one", "threads", "ratio", "note"),
    [
        (74.0, 38.0, 1, 0.38, ("latency is on 1 thread, of the original on 2: load it with threads=1",)),
        (55.0, 60.0, 2, 0.55, ()),
        (55.0, 54.0, 2, 0.55, ()),  # no more than noise
    ],
)
def test_a_candidate_counts_on_the_number_of_threads_it_is_fastest_with(
    on_two: float,
    on_one: float,
    threads: int,
    ratio: float,
    note: tuple[str, ...],
    wide: Bundle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latencies = {"original": 100.0, "control": 100.0, "candidate 0 on 2": on_two, "candidate 0 on 1": on_one}
    races = timed(monkeypatch, latencies)
    (speed,) = measure_speeds(wide, [wide], 1, (2, 1))
    assert races == [[("original", 2), ("control", 2), ("candidate 0 on 2", 2), ("candidate 0 on 1", 1)]]
    assert (speed.threads, speed.threads_before) == (threads, 2)
    assert speed.ratio.median == pytest.approx(ratio)
    assert speed.after_us == pytest.approx(100 * ratio)
    assert tuple(_threads_note(speed)) == note


def test_quality_is_held_to_the_budget_and_nan_never_passes() -> None:
    assert kept(EVEN, after=89.6)
    assert not kept(EVEN, after=89.4)
    assert kept(EVEN, after=89.4, budget=Budget(max_drop=1))
    assert not kept(EVEN, after=float("nan"), budget=Budget(max_drop=100))
    assert kept(EVEN, after=95.0)


def test_samples_without_labels_calibrate_and_judge_by_agreement(exported: Callable[..., Path], tmp_path: Path) -> None:
    from toolkit.evaluation import quality_for

    bundle = Bundle.open(exported("lenet"))
    pixels = np.random.default_rng(0).random((70, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "x.npz", pixels=pixels)
    quality, calibration = quality_for(bundle, str(tmp_path / "x.npz"))
    assert (quality.metric.name, quality.data) == ("agreement", "the samples of x.npz, against fp32")
    assert quality.measure(bundle) == pytest.approx(100.0)
    assert calibration is not None
    batches = [feeds["pixels"] for feeds in calibration(None)]
    np.testing.assert_array_equal(np.concatenate(batches), pixels)
    np.savez(tmp_path / "y.npz", inputs=pixels, targets=np.arange(70) % 10)
    assert quality_for(bundle, str(tmp_path / "y.npz"))[0].metric.name == "accuracy"


def test_the_output_that_suffers_most_decides(tmp_path: Path) -> None:
    from exporters.export import export
    from exporters.source import find_source
    from toolkit.evaluation import quality_for

    bundle = export(find_source(f"{Path(__file__).with_name('user_networks.py')}:two_heads"), tmp_path / "t.bundle").bundle
    quality, _ = quality_for(bundle, None)
    with pytest.raises(MeasuredRefusal, match="agreement drops"):
        quantize(bundle, tmp_path / "q.bundle", scheme="int8-dynamic", quality=quality, budget=Budget(for_size=True), threads=1)


def with_constant_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Weights as some exporters write them."""
    constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in model.graph.initializer]
    nodes = [*constants, *model.graph.node]
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_in_constant_nodes_are_quantized_too(scheme: str, tmp_path: Path) -> None:
    bundle = adopt(save(with_constant_nodes(wide_model()), tmp_path / "w.onnx"), tmp_path / "w.bundle").bundle
    converted = convert(bundle, scheme, calibration=lambda graph: samples())
    assert [node.quantized for node in converted.nodes] == [True, True]
    (model,) = converted.models.values()
    assert model.ByteSize() < 0.55 * bundle.graph_bytes
    feeds = next(samples())
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = Session(bundle.graph_path(), bundle.graph()[1].signature).run(feeds)["y"]
    assert METRICS["tensors"].compute(session.run(None, feeds)[0], expected) > (80 if scheme == "int4-weights" else 96)


def test_weights_inside_a_branch_are_said_to_be_left_alone() -> None:
    inner = helper.make_graph(
        list(wide_model().graph.node), "then", [], wide_model().graph.output, wide_model().graph.initializer
    )
    node = helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner)
    shape = (TensorProto.FLOAT, ["batch", 256])
    model = make_model([node], {}, inputs={"x": shape, "c": (TensorProto.BOOL, [])}, outputs={"z": shape})
    with pytest.raises(QuantizationRefused, match="and the 6 nodes inside its If, Loop or Scan are left alone"):
        decide(SCHEMES["int8-weights"], quantizable(model), (), ())


def test_operator_types_can_be_chosen(tmp_path: Path) -> None:
    model = quantizable(wide_model())
    decisions = decide(SCHEMES["int8-static"], model, ("MatMul",), ())
    assert [item.quantized for item in decisions] == [True, True]
    with pytest.raises(UnknownName, match="did you mean 'MatMul'"):
        decide(SCHEMES["int8-static"], model, ("Matmul",), ())
    with pytest.raises(OptionError, match="cannot be combined"):
        decide(SCHEMES["int8-static"], model, ("MatMul",), ("MatMul",))
    with pytest.raises(QuantizationRefused, match=r"nothing to quantize here: first \(MatMul\): left out by --exclude"):
        decide(SCHEMES["int8-static"], model, (), ("MatMul",))
    with pytest.raises(QuantizationRefused, match="left out by --only"):
        decide(SCHEMES["int8-static"], model, ("Relu",), ())


def test_a_graph_with_too_little_weight_is_refused(tmp_path: Path) -> None:
    bundle = adopt(save(gemm_model(), tmp_path / "g.onnx"), tmp_path / "g.bundle").bundle
    for scheme in ("int8-dynamic", "int8-static"):
        with pytest.raises(QuantizationRefused, match="12 weights are too few"):
            quantize(
                bundle,
                tmp_path / "q.bundle",
                scheme=scheme,
                quality=agreement_with(bundle),
                calibration=lambda graph: iter(()),
                threads=1,
            )
    with pytest.raises(QuantizationRefused, match="does not make it smaller"):
        quantize(bundle, tmp_path / "q.bundle", scheme="fp16", quality=agreement_with(bundle), threads=1)


def test_unknown_schemes_and_missing_calibration_are_told(wide: Bundle, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'int8-static'"):
        quantize(wide, tmp_path / "q.bundle", scheme="int8-statick", quality=agreement_with(wide), threads=1)
    with pytest.raises(OptionError, match="pass --data"):
        quantize(wide, tmp_path / "q.bundle", scheme="int8-static", quality=agreement_with(wide), threads=1)


def test_lenet_int8_on_its_fully_connected_layers_is_small_and_as_good(exported: Callable[[str], Path], tmp_path: Path) -> None:
    from toolkit.evaluation import quality_for

    bundle = Bundle.open(exported("lenet"))
    quality, calibration = quality_for(bundle, None)
    report = quantize(
        bundle,
        tmp_path / "q.bundle",
        scheme="int8-static",
        only=("Gemm",),
        quality=quality,
        calibration=calibration,
        budget=Budget(max_drop=0.5, for_size=True),  # speed is for benchmarks, not for tests
        threads=1,
    )
    assert report.size_ratio <= 0.35
    assert report.drop <= 0.5
    assert verify_bundle(tmp_path / "q.bundle")
    assert {item.operator for item in report.nodes if item.quantized} == {"Gemm"}
