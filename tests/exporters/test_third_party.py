"""Models that nobody here wrote go the whole way: export, check, verify, optimize, verify again, bench, quantize."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from exporters.adopt import adopt
from exporters.check import check
from exporters.graph import operators_of, read_model
from exporters.optimize import optimize
from exporters.quantize import Budget, quantize
from runtime.bench import bench, bundle_variant
from runtime.bundle import Bundle
from runtime.errors import EdgekitError, QuantizationRefused
from runtime.verify import verify_bundle
from toolkit.cli import run
from toolkit.evaluation import quality_for

from .third_party import MODELS

Find = Callable[[str], Path]


@pytest.fixture
def adopted(shared: Callable[[str, Callable[[Path], object]], Path]) -> Find:
    """adopted("magika"): its bundle; made once."""

    def make(name: str, folder: Path) -> None:
        report = adopt(MODELS[name](folder), folder / "adopted.bundle")
        (folder / "report.json").write_text(json.dumps(report.to_json()))

    return lambda name: shared(f"third-party-{name}", lambda folder: make(name, folder)) / "adopted.bundle"


@pytest.mark.parametrize("name", MODELS)
def test_someones_model_is_adopted_checked_optimized_and_timed(name: str, adopted: Find, tmp_path: Path) -> None:
    path = adopted(name)
    assert verify_bundle(path, threads=1)
    report = check(path)
    errors = {finding.rule for finding in report.findings if finding.severity == "error"}
    assert not errors
    optimize(Bundle.open(path), tmp_path / "optimized.bundle")
    assert verify_bundle(tmp_path / "optimized.bundle", threads=1)
    before, after = (read_model(Bundle.open(item).graph_path()) for item in (path, tmp_path / "optimized.bundle"))
    assert operators_of(after).total() <= operators_of(before).total()
    for model in (before, after):
        del model.graph.value_info[:]  # shapes that were written down on the way
    assert after.ByteSize() <= before.ByteSize()
    variants = [bundle_variant(item, threads=1) for item in (path, tmp_path / "optimized.bundle")]
    timed = bench(variants, threads=1, rounds=1, launches=1, turn_seconds=0.001)
    assert all(timing.latency.median > 0 for timing in timed.timings)


@pytest.mark.parametrize("name", ["silero-vad", "magika", "ocr-direction", "squeezenet-opset7", "gpt2-with-past"])
def test_goldens_are_the_answers_of_the_original(name: str, adopted: Find, tmp_path: Path) -> None:
    path = adopted(name)
    original = path.parent / "gpt2.onnx" if name == "gpt2-with-past" else MODELS[name](tmp_path)
    session = onnxruntime.InferenceSession(str(original), providers=["CPUExecutionProvider"])
    bundle = Bundle.open(path)
    for _, inputs, expected in bundle.goldens():
        answers = dict(zip([value.name for value in session.get_outputs()], session.run(None, inputs), strict=True))
        for output, values in expected.items():
            assert np.abs(answers[output] - values).max() <= bundle.manifest.tolerance["model"][output].allowed


def test_a_sample_rate_takes_both_branches_and_two_unnamed_batch_axes_are_one(adopted: Find) -> None:
    bundle = Bundle.open(adopted("silero-vad"))
    shapes = {spec.name: spec.shape for spec in bundle.graph()[1].signature.inputs}
    assert shapes == {"input": ("input_0", "input_1"), "state": (2, "input_0", 128), "sr": ()}
    assert {int(inputs["sr"]) for _, inputs, _ in bundle.goldens()} == {0, 16000}


def test_bytes_given_as_floats_reach_over_the_table_they_index(adopted: Find) -> None:
    (values,) = (inputs["bytes"] for _, inputs, _ in list(Bundle.open(adopted("magika")).goldens())[:1])
    assert values.max() > 250
    np.testing.assert_array_equal(values, np.round(values))


def test_tokens_and_positions_reach_over_their_tables(adopted: Find) -> None:
    bundle = Bundle.open(adopted("gpt2-with-past"))
    goldens = [inputs for _, inputs, _ in bundle.goldens()]
    assert 80 < max(inputs["tokens"].max() for inputs in goldens) < 97
    assert 97 < max(inputs["positions"].max() for inputs in goldens) < 256
    assert {size for inputs in goldens for size in np.unique(inputs["mask"])} == {0, 1}


def test_an_image_moves_in_steps_of_32(adopted: Find) -> None:
    report = json.loads((adopted("ocr-detection").parent / "report.json").read_text())
    heights = {case["sizes"]["p2o.DynamicDimension.1"] for case in report["cases"]}
    assert {32, 64, 96} <= heights
    assert 33 not in heights
    assert any("DynamicDimension.1=33," in text for text in report["refused_by_reference"])


def test_weights_listed_as_inputs_are_not_asked_for(adopted: Find) -> None:
    model = read_model(Bundle.open(adopted("squeezenet-opset7")).graph_path())
    assert (model.ir_version, model.opset_import[0].version, len(model.graph.input)) == (3, 7, 17)
    assert [spec.name for spec in Bundle.open(adopted("squeezenet-opset7")).graph()[1].signature.inputs] == ["data"]


@pytest.mark.parametrize("name", ["int8-cnn", "fp16-cnn"])
def test_a_model_that_rounds_coarsely_is_allowed_its_own_rounding_only(name: str, adopted: Find, tmp_path: Path) -> None:
    bundle = Bundle.open(adopted(name))
    (tolerance,) = bundle.manifest.tolerance["model"].values()
    assert bundle.manifest.precision == name.removesuffix("-cnn")
    assert 0.001 < tolerance.allowed < 0.02  # of probabilities
    with pytest.raises(QuantizationRefused, match=f"already {bundle.manifest.precision}"):
        _quantize(bundle, tmp_path / "q.bundle")


@pytest.mark.parametrize("name", ["ocr-direction", "silero-vad"])
def test_int8_is_kept_or_refused_with_the_reason(name: str, adopted: Find, tmp_path: Path) -> None:
    bundle = Bundle.open(adopted(name))
    try:
        report = _quantize(bundle, tmp_path / "q.bundle")
    except QuantizationRefused as refusal:
        assert "\n" not in str(refusal)
        assert not (tmp_path / "q.bundle").exists()
        assert any(word in str(refusal) for word in ("--max-drop", "smaller", "nothing to quantize", "cannot be applied"))
    else:
        assert report.size_ratio < 1
        assert verify_bundle(tmp_path / "q.bundle", threads=1)


@pytest.mark.parametrize("name", ["squeezenet-opset7", "gpt2-with-past", "silero-vad", "int8-cnn"])
def test_auto_gives_a_bundle_within_its_budget_or_the_reason_in_one_line(
    name: str, adopted: Find, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["quantize", str(adopted(name)), "--scheme", "auto", "--time", "0", "--max-drop", "5", "--threads", "1", "--json"]
    code = run([*command, "-o", str(tmp_path / "q.bundle")])
    printed = capsys.readouterr()
    assert code in (0, 1)
    if code == 1:
        assert printed.err.splitlines()[-1].startswith("error: ")
        assert "bug in edgekit" not in printed.err
        assert not list(tmp_path.iterdir())
        return
    report = json.loads(printed.out)["report"]
    assert report["drop"] <= 5
    assert report["size_ratio"] < 1
    assert verify_bundle(tmp_path / "q.bundle", threads=1)


def test_every_small_model_of_the_standard_is_adopted_or_refused_in_one_line(tmp_path: Path) -> None:
    """The 140 graphs of the standard's own tests: sequences, strings, training operators, opsets from 1 on."""
    root = Path(onnx.__file__).parent / "backend" / "test" / "data"
    paths = sorted(root.glob("*/*/model.onnx"))
    assert len(paths) > 100
    taken = 0
    for number, path in enumerate(paths):
        check(path)
        try:
            adopt(path, tmp_path / f"{number}.bundle")
            taken += 1
        except EdgekitError as error:
            assert "\n" not in str(error)
            assert str(path) in str(error)
    assert taken >= 95


def _quantize(bundle: Bundle, target: Path):  # type: ignore[no-untyped-def]
    quality, calibration = quality_for(bundle, None)
    budget = Budget(for_size=True)  # speed is measured elsewhere
    return quantize(bundle, target, scheme="int8-dynamic", quality=quality, calibration=calibration, budget=budget, threads=1)
