"""How weights become numbers: block sizes, symmetric blocks, hqq and gptq, in real onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from exporters.quantizers import hqq
from exporters.quantizers.blocks import SIZES, filled_up, nearest, range_grid, unpack, values
from exporters.quantizers.gptq import compensated
from exporters.quantizers.hqq import NORM, fitted
from exporters.quantizers.rounding import WeightSettings, rounded, rounded_columns

from ..helpers import make_model
from .rounded_models import FLOAT, Array, answers, applied, correlated, heavy_tailed, product_model

# What is stored is what onnxruntime computes with.


@pytest.mark.parametrize("rounding", ["nearest", "hqq"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("scheme", ["int8-weights", "int4-weights"])
def test_onnxruntime_multiplies_by_the_weights_that_unpacking_gives(
    scheme: str, block: int, symmetric: bool, rounding: str
) -> None:
    weight = heavy_tailed(256, 24)
    settings = WeightSettings(block, symmetric, rounding)
    [model] = applied(product_model(weight), scheme=scheme, block=block, symmetric=symmetric, rounding=rounding)
    [node] = model.graph.node
    assert helper.get_node_attr_value(node, "block_size") == block
    assert len(node.input) == (3 if symmetric else 4)  # no zero points are stored
    computed = answers(model, {"x": np.eye(256, dtype=np.float32)})[0]  # a row with one number other than zero is exact in int8
    expected = unpack(rounded(weight.T, 4 if scheme == "int4-weights" else 8, settings), 256).T
    np.testing.assert_allclose(computed, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("width", "block"), [(64, 16), (64, 64), (96, 128)])
@pytest.mark.parametrize("tied", [False, True])
def test_onnxruntime_reads_the_embeddings_that_unpacking_gives(tied: bool, width: int, block: int, symmetric: bool) -> None:
    table = heavy_tailed(100, width)
    nodes = [helper.make_node("Gather", ["E", "tokens"], ["y"])]
    outputs = {"y": (FLOAT, ["batch", width])}
    if tied:
        nodes += [helper.make_node("Transpose", ["E"], ["T"], perm=[1, 0]), helper.make_node("MatMul", ["y", "T"], ["z"])]
        outputs |= {"z": (FLOAT, ["batch", 100])}
    model = make_model(nodes, {"E": table}, inputs={"tokens": (TensorProto.INT64, ["batch"])}, outputs=outputs)
    [quantized] = applied(model, block=block, symmetric=symmetric, rounding="hqq")
    read = answers(quantized, {"tokens": np.arange(100)})[0]
    expected = unpack(rounded(table, 4 if tied else 8, WeightSettings(block, symmetric, "hqq")), width)
    np.testing.assert_allclose(read, expected, rtol=1e-6, atol=1e-7)
    sizes = {helper.get_node_attr_value(node, "block_size") for node in quantized.graph.node}
    assert sizes == {32 if block == 128 else block}  # the largest that divides the width


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_packing_is_onnxruntimes_own(bits: int) -> None:
    from onnxruntime.capi import _pybind_state as native

    matrix = heavy_tailed(64, 8)
    blocks = rounded(matrix.T, bits, WeightSettings(16, symmetric=True))
    assert blocks.zeros is None
    numbers, scales, zeros = np.zeros(blocks.numbers.shape, np.uint8), np.zeros(8 * 4, np.float32), np.zeros((8, 4), np.uint8)
    getattr(native, f"quantize_matmul_{bits}bits")(numbers, matrix, scales, zeros, 16, 8, 64, True)
    np.testing.assert_array_equal(blocks.numbers, numbers)
    np.testing.assert_array_equal(blocks.scales.ravel(), scales)


# HQQ.


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 7, 8])
def test_hqq_has_a_smaller_weight_error_than_the_range_and_in_no_block_a_larger_one(bits: int, symmetric: bool) -> None:
    filled = filled_up(heavy_tailed(40, 256), 64)
    filled[0, 0] = 0
    plain = range_grid(filled, bits, symmetric=symmetric)

    def error(grid: Any) -> Array:
        result: Array = (np.abs(filled - values(nearest(filled, grid), grid)) ** NORM).mean(axis=-1)
        return result

    before, after = error(plain), error(fitted(filled, plain))
    assert (after <= before * (1 + 1e-5)).all()
    assert after[0, 0] == 0
    assert after.mean() < 0.995 * before.mean()


def test_hqq_gives_the_same_whether_or_not_it_is_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = filled_up(heavy_tailed(10, 64), 32)
    whole = fitted(filled, range_grid(filled, 4))
    monkeypatch.setattr("exporters.quantizers.hqq._AT_ONCE", 3 * 64)
    monkeypatch.setattr("exporters.quantizers.hqq._FITTED", {})
    parts = fitted(filled, range_grid(filled, 4))
    np.testing.assert_array_equal(whole.scales, parts.scales)


def test_hqq_fits_a_matrix_once_and_every_other_one_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def count(filled: Array, scales: Array, zeros: Array, highest: int) -> Array:
        runs.append(highest)
        return real(filled, scales, zeros, highest)

    real = hqq._fitted_scales
    monkeypatch.setattr(hqq, "_fitted_scales", count)
    monkeypatch.setattr(hqq, "_FITTED", {})
    filled = filled_up(heavy_tailed(10, 64), 32)
    first = fitted(filled, range_grid(filled, 4))
    first.scales[:] = 0  # is the caller's own
    again = fitted(filled.copy(), range_grid(filled, 4))
    assert len(runs) == 1
    assert (again.scales > 0).all()
    other = filled.copy()
    other[3, 1, 7] *= 1.01
    for given, bits, symmetric in ((other, 4, False), (filled, 8, False), (filled, 4, True)):
        fitted(given, range_grid(given, bits, symmetric=symmetric))
    assert len(runs) == 4


# GPTQ.


def output_error(x: Array, rows: Array, quantized: Array) -> float:
    return float(np.linalg.norm(x @ (quantized - rows).T) / np.linalg.norm(x @ rows.T))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "width"), [(4, 128), (8, 128), (4, 72)])
def test_gptq_has_a_smaller_output_error_on_the_calibration_inputs(bits: int, width: int, symmetric: bool) -> None:
    rows, x = heavy_tailed(48, width), correlated(400, width)

    def error(rounding: str) -> float:
        blocks = rounded(rows, bits, WeightSettings(32, symmetric, rounding), x.T @ x if rounding == "gptq" else None)
        return output_error(x, rows, unpack(blocks, width))

    assert error("gptq") < 0.7 * min(error("nearest"), error("hqq"))


def test_gptq_on_inputs_that_do_not_depend_on_each_other_rounds_to_the_nearest() -> None:
    rows = heavy_tailed(20, 150)
    filled = filled_up(rows, 16)  # the last block is not full
    grid = range_grid(filled, 4)
    moments = np.diag(np.random.default_rng(0).uniform(1, 9, 150)).astype(np.float32)
    np.testing.assert_array_equal(compensated(rows, moments, grid, 16), nearest(filled, grid))
    np.testing.assert_array_equal(compensated(rows, 0 * moments, grid, 16), nearest(filled, grid))  # inputs that are all zero


def test_gptq_gives_the_same_whether_errors_reach_later_weights_at_once_or_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, x = heavy_tailed(20, 150), correlated(300, 150)
    grid = range_grid(filled_up(rows, 16), 4)
    monkeypatch.setattr("exporters.quantizers.gptq._AT_ONCE", 1000)
    whole = compensated(rows, x.T @ x, grid, 16)
    monkeypatch.setattr("exporters.quantizers.gptq._AT_ONCE", 40)
    assert (compensated(rows, x.T @ x, grid, 16) == whole).mean() > 0.99  # sums in another order may turn a tie


def test_the_form_for_many_rows_is_rounded_by_gptq_too_and_cannot_saturate() -> None:
    matrix, x = heavy_tailed(128, 40), correlated(400, 128)

    def error(settings: WeightSettings, moments: Array | None) -> float:
        numbers, scales = rounded_columns(matrix, settings, moments)
        assert numbers.dtype == np.int8
        assert 2 * 255 * np.abs(numbers.astype(int)).max() <= np.iinfo(np.int16).max
        return output_error(x, matrix.T, (numbers * scales).T)

    assert error(WeightSettings(rounding="gptq"), x.T @ x) < 0.7 * error(WeightSettings(), None)


@pytest.mark.parametrize("many_rows", [False, True])
def test_a_graph_rounded_by_gptq_is_nearer_to_its_original_on_the_samples(many_rows: bool) -> None:
    first, second = heavy_tailed(64, 128), heavy_tailed(128, 64, seed=3)
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "B"], ["y"], transB=1),
    ]
    shapes = {"x": (FLOAT, ["batch", 64])}, {"y": (FLOAT, ["batch", 64])}
    model = make_model(nodes, {"A": first, "B": np.ascontiguousarray(second.T)}, inputs=shapes[0], outputs=shapes[1])
    x = correlated(512, 64)
    scheme = "int8-weights" if many_rows else "int4-weights"

    def error(rounding: str) -> float:
        [quantized] = applied(
            model,
            scheme=scheme,
            many_rows=many_rows,
            rounding=rounding,
            samples=lambda: iter([{"x": part} for part in np.split(x, 4)]),
        )
        reference = answers(model, {"x": x})[0]
        return float(np.linalg.norm(answers(quantized, {"x": x})[0] - reference) / np.linalg.norm(reference))

    assert error("gptq") < 0.8 * error("nearest")
