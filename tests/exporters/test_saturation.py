"""What could saturate on a CPU with AVX2 and without VNNI is foreseen; the arithmetic of such a CPU is imitated here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from exporters.adopt import adopt
from exporters.quantize import Budget, QuantizeReport, quantize
from exporters.quantized_graphs import Part, convert_parts
from exporters.quantizers.saturation import (
    FULL,
    REDUCED,
    activation_numbers,
    can_saturate,
    kernel_rows,
    largest_numbers,
    pair_sums,
    quantize_weight,
)
from exporters.quantizers.static_settings import StaticSettings
from exporters.race import Speed
from runtime.bundle import Bundle
from runtime.statistics import Estimate
from runtime.verify import verify_bundle

from ..helpers import make_model, save
from .test_quantize import agreement_with

Array = np.ndarray[Any, Any]
WIDTH = 256


def vpmaddubsw(unsigned: Array, signed: Array) -> Array:
    """(rows, inputs) uint8 by (inputs, outputs) int8, each two neighbours summed up in 16 bits; then in 32."""
    products = unsigned.astype(np.int64)[:, :, None] * signed.astype(np.int64)[None]
    pairs = products[:, 0::2] + products[:, 1::2]
    return np.clip(pairs, -32768, 32767).sum(axis=1)


def exact(unsigned: Array, signed: Array) -> Array:
    return unsigned.astype(np.int64) @ signed.astype(np.int64)


def numbers_of(values: Array, ends: tuple[float, float]) -> Array:
    scale, zero = activation_numbers(*ends)
    return np.clip(np.rint(values / scale) + zero, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wide", [False, True])  # activations reach all of their range
@pytest.mark.parametrize("wild", [False, True])  # large weights are next to large ones
def test_what_is_not_foreseen_to_saturate_does_not(seed: int, wide: bool, wild: bool) -> None:
    random = np.random.default_rng(seed)
    x = (random.standard_normal((64, 32)) * (3.0 if wide else 0.4)).clip(-3, 3).astype(np.float32)
    weight = random.standard_normal((32, 16)).astype(np.float32)
    weight[0] = random.choice([-1, 1], 16) * np.abs(weight).max() * (1 if wild else 8)
    numbers, _ = quantize_weight(weight, FULL, 1)
    foreseen = can_saturate(numbers, x.max(axis=0), (-3.0, 3.0))
    unsigned = numbers_of(x, (-3.0, 3.0))
    saturates = not np.array_equal(vpmaddubsw(unsigned, numbers), exact(unsigned, numbers))
    assert foreseen or not saturates
    assert foreseen == (wide or wild)
    assert saturates or not (wide and wild)


def test_saturation_is_foreseen_only_where_the_largest_activations_meet_the_largest_weights() -> None:
    numbers = np.array([[120, 3], [120, 3], [1, 127], [1, -127]], np.int8)
    ends = (0.0, 255.0)  # a step is 1
    for highest, expected in (([255, 255, 0, 0], True), ([100, 100, 255, 255], False), ([130, 160, 9, 9], True)):
        assert can_saturate(numbers, np.array(highest, np.float32), ends) == expected
    unsigned = np.array([[255, 255, 0, 0]], np.uint8)
    assert vpmaddubsw(unsigned, numbers)[0, 0] == 32767 < exact(unsigned, numbers)[0, 0]


def test_seven_bits_never_saturate_whatever_the_activations() -> None:
    worst = np.full((6, 3), REDUCED, np.int8)
    worst[:, 1] = -REDUCED
    assert pair_sums(worst, np.full(6, 255)) == (-32640, 32640)
    unsigned = np.full((2, 6), 255, np.uint8)
    np.testing.assert_array_equal(vpmaddubsw(unsigned, worst), exact(unsigned, worst))


def test_pairs_of_an_odd_number_of_inputs_and_of_many_outputs_are_all_looked_at() -> None:
    random = np.random.default_rng(0)
    numbers = random.integers(-127, 128, (7, 2500)).astype(np.int8)
    largest = random.integers(0, 256, 7)
    padded = np.vstack([numbers, np.zeros((1, 2500), np.int8)]).astype(int) * np.append(largest, 0)[:, None]
    least = (np.minimum(padded[0::2], 0) + np.minimum(padded[1::2], 0)).min()
    greatest = (np.maximum(padded[0::2], 0) + np.maximum(padded[1::2], 0)).max()
    assert pair_sums(numbers, largest) == (least, greatest)


def test_a_little_more_than_was_seen_is_expected_and_padding_is_zero() -> None:
    np.testing.assert_array_equal(largest_numbers(np.array([100.0, 250.0, -20.0]), (-55.0, 200.0)), [171, 255, 61])


def test_a_convolution_is_the_product_that_its_kernels_make_of_it() -> None:
    random = np.random.default_rng(0)
    weight = random.integers(-9, 10, (4, 3, 2, 2))
    image = random.integers(0, 9, (3, 2, 2))
    rows, seen = kernel_rows(weight, image.reshape(3, -1).max(axis=1))
    assert rows.shape == (12, 4)
    patch = np.moveaxis(image, 0, -1).reshape(-1)  # channels last, as the kernels have it
    np.testing.assert_array_equal(patch @ rows, (weight * image).sum(axis=(1, 2, 3)))
    assert (patch <= seen).all()


def test_groups_of_a_convolution_share_the_largest_of_their_channels() -> None:
    _, seen = kernel_rows(np.zeros((4, 2, 1, 1), np.int8), np.array([1.0, 5.0, 3.0, 2.0]))
    np.testing.assert_array_equal(seen, [3.0, 5.0])


# Whole bundles.


def two_products() -> onnx.ModelProto:
    """Of the first, each weight that is large has a neighbour that is zero; the second can saturate."""
    random = np.random.default_rng(0)
    calm = random.uniform(-0.05, 0.05, (WIDTH, WIDTH)).astype(np.float32)
    calm[0], calm[1] = 1.0, 0.0
    wild = random.choice([-1.0, 1.0], (WIDTH, WIDTH)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["h"], name="calm"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "B"], ["y"], name="wild"),
    ]
    shape = (TensorProto.FLOAT, ["batch", WIDTH])
    return make_model(nodes, {"A": calm, "B": wild}, inputs={"x": shape}, outputs={"y": shape})


def samples() -> Iterator[dict[str, Array]]:
    x = np.random.default_rng(1).uniform(-1, 1, (64, WIDTH)).astype(np.float32)
    return iter([{"x": x}])


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    even = Speed(Estimate(1.0, 0.99, 1.01), Estimate(1.0, 0.99, 1.01), 100.0, 100.0, 1, 1, 1)
    monkeypatch.setattr("exporters.quantize.measure_speed", lambda *_: even)
    return adopt(save(two_products(), tmp_path / "p.onnx"), tmp_path / "p.bundle").bundle


def quantized(bundle: Bundle, target: Path, reduce_range: str, **settings: Any) -> QuantizeReport:
    return quantize(
        bundle,
        target,
        scheme="int8-static",
        settings={"reduce_range": reduce_range, **settings},
        quality=agreement_with(bundle),
        calibration=lambda graph: samples(),
        budget=Budget(max_drop=100, for_size=True),
        threads=1,
    )


def largest_weights(bundle: Bundle) -> dict[str, int]:
    weights = onnx.load(bundle.graph_path()).graph.initializer
    return {
        tensor.name[0]: int(np.abs(numpy_helper.to_array(tensor).astype(int)).max())
        for tensor in weights
        if tensor.data_type == TensorProto.INT8 and len(tensor.dims) == 2
    }


@pytest.mark.parametrize("per_channel", ["yes", "no"])
@pytest.mark.parametrize(
    ("reduce_range", "calm", "wild"), [("always", REDUCED, REDUCED), ("auto", FULL, REDUCED), ("never", FULL, FULL)]
)
def test_seven_bits_are_taken_where_and_only_where_eight_could_saturate(
    reduce_range: str, calm: int, wild: int, per_channel: str, bundle: Bundle, tmp_path: Path
) -> None:
    report = quantized(bundle, tmp_path / "q.bundle", reduce_range, per_channel=per_channel)
    small = Bundle.open(tmp_path / "q.bundle")
    assert largest_weights(small) == {"A": calm, "B": wild}
    needed = ["avx512_vnni", "avx_vnni", "amx_int8", "asimd"] if reduce_range == "never" else []
    assert small.manifest.requirements["cpu_features"] == needed
    reasons = {node.node: node.reason for node in report.nodes}
    assert reasons["calm"] == "chosen"
    expected = {"always": "chosen", "auto": "seven-bit weights: eight could saturate", "never": "can saturate on CPUs without"}
    assert expected[reduce_range] in reasons["wild"]


def test_a_weight_of_two_products_takes_seven_bits_if_one_of_them_could_saturate(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weight = random.choice([-1.0, 1.0], (WIDTH, WIDTH)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["s", "B"], ["h"], name="calm"),
        helper.make_node("MatMul", ["x", "B"], ["z"], name="wild"),
        helper.make_node("Add", ["h", "z"], ["y"]),
    ]
    shape = (TensorProto.FLOAT, ["batch", WIDTH])
    model = make_model(nodes, {"B": weight}, inputs={"s": shape, "x": shape}, outputs={"y": shape})
    shared = adopt(save(model, tmp_path / "s.onnx"), tmp_path / "s.bundle").bundle
    x = random.uniform(0, 1, (64, WIDTH)).astype(np.float32)
    sparse = np.where(np.arange(WIDTH) % 2, np.float32(0), x)  # of two neighbours one is zero
    settings = StaticSettings(reduce_range="auto")
    made = convert_parts(shared, (Part("int8-static", settings),), lambda graph: iter([{"s": sparse, "x": x}]))
    reasons = {node.node: node.reason for node in made.nodes}
    assert "seven-bit weights" not in reasons["calm"]
    assert "seven-bit weights" in reasons["wild"]
    (numbers,) = (
        numpy_helper.to_array(tensor) for tensor in made.models["model"].graph.initializer if tensor.dims == [WIDTH] * 2
    )
    assert np.abs(numbers.astype(int)).max() == REDUCED


def test_what_two_operators_read_along_different_axes_is_looked_at_along_both(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(0)
    kernel = random.choice([-1.0, 1.0], (8, 4, 3, 3)).astype(np.float32)
    matrix = random.choice([-1.0, 1.0], (WIDTH, WIDTH)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "C"], ["c"], name="convolution", pads=[1, 1, 1, 1]),
        helper.make_node("MatMul", ["x", "M"], ["m"], name="product"),
    ]
    shape = (TensorProto.FLOAT, ["batch", 4, WIDTH, WIDTH])
    outputs = {"c": (TensorProto.FLOAT, ["batch", 8, WIDTH, WIDTH]), "m": shape}
    model = make_model(nodes, {"C": kernel, "M": matrix}, inputs={"x": shape}, outputs=outputs)
    mixed = adopt(save(model, tmp_path / "m.onnx"), tmp_path / "m.bundle").bundle
    images = {"x": random.uniform(0, 1, (2, 4, WIDTH, WIDTH)).astype(np.float32)}
    part = Part("int8-static", StaticSettings(reduce_range="auto"))
    made = convert_parts(mixed, (part,), lambda graph: iter([images]))
    assert ["seven-bit weights" in node.reason for node in made.nodes] == [True, True]


def test_verify_warns_on_a_cpu_that_lacks_what_a_bundle_needs(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from runtime.__main__ import main
    from toolkit.cli import run

    risky, safe = tmp_path / "risky.bundle", tmp_path / "safe.bundle"
    quantized(bundle, risky, "never")
    quantized(bundle, safe, "auto")
    for features, warned in ((["avx2", "avx512f"], True), ([], True), (["avx2", "avx_vnni"], False), (["asimd"], False)):
        monkeypatch.setattr("runtime.verify.cpu_features", lambda features=features: features)
        report = verify_bundle(risky)
        assert report  # the goldens agree: this machine is another one
        assert bool(report.warnings) == warned
        assert not verify_bundle(safe).warnings
        for command in (main, run):
            assert command(["verify", str(risky)]) == 0
            said = capsys.readouterr()
            assert ("warning: this CPU has none of avx512_vnni, avx_vnni, amx_int8, asimd: int8 products" in said.err) == warned
            assert ("quantize the original with --set reduce_range=always" in said.err) == warned
            assert "verified" in said.out
    monkeypatch.setattr("runtime.verify.cpu_features", lambda: ["avx2"])
    assert main(["verify", str(risky), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == 1
