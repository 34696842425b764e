"""gptq over whole graphs: the moments it rests on, weights that are read in several places; settings that are refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from architectures.settings import apply_settings
from exporters.quantizers import SCHEMES, rounding_moments
from exporters.quantizers.rounding import WeightSettings, rounded
from exporters.quantizers.rounding_moments import Moments
from runtime.errors import DataError, OptionError

from ..helpers import make_model
from .rounded_models import FLOAT, Array, applied, bits_of, correlated, heavy_tailed, product_model, weights_of

# The moments.


def chain() -> onnx.ModelProto:
    """Three products; the weight of two of them is one."""
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["a"], name="first"),
        helper.make_node("Tanh", ["a"], ["t"]),
        helper.make_node("MatMul", ["t", "A"], ["b"], name="second"),
        helper.make_node("MatMul", ["b", "B"], ["y"], name="third"),
    ]
    shape = (FLOAT, ["batch", "time", 64])
    weights = {"A": heavy_tailed(64, 64), "B": heavy_tailed(64, 64, seed=1)}
    return make_model(nodes, weights, inputs={"x": shape}, outputs={"y": shape})


def ragged(count: int = 3) -> Iterator[dict[str, Array]]:
    return ({"x": correlated(2 * time, 64, seed=time).reshape(2, time, 64)} for time in range(5, 5 + count))


def test_moments_are_summed_up_over_batches_of_any_length_and_over_the_products_of_a_weight() -> None:
    model = chain()
    moments = Moments(model, {("x", "t"): 64, ("b",): 64}, ragged)
    x = np.concatenate([feeds["x"].reshape(-1, 64) for feeds in ragged()])
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    t = np.tanh(x @ weights["A"])
    b = t @ weights["A"]
    np.testing.assert_allclose(moments.of(("x", "t")), x.T @ x + t.T @ t, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(moments.of(("b",)), b.T @ b, rtol=1e-3, atol=1e-3)


def test_moments_of_an_input_of_the_graph_need_no_run_of_it() -> None:
    x = np.concatenate([feeds["x"].reshape(-1, 64) for feeds in ragged()])
    np.testing.assert_allclose(Moments(chain(), {("x",): 64}, ragged).of(("x",)), x.T @ x, rtol=1e-3, atol=1e-3)


def test_moments_are_gathered_in_as_many_passes_as_memory_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    def samples() -> Iterator[dict[str, Array]]:
        passes.append(1)
        return ragged()

    widths = {("x", "t"): 64, ("b",): 64, ("t",): 64}
    together = Moments(chain(), widths, samples)
    wanted = [together.of(inputs) for inputs in widths]
    assert len(passes) == 1
    monkeypatch.setattr(rounding_moments, "_AT_ONCE", 2 * 4 * 64**2)
    passes.clear()
    apart = Moments(chain(), widths, samples)
    for inputs, expected in zip(widths, wanted, strict=True):
        np.testing.assert_array_equal(apart.of(inputs), expected)
        assert len(apart._gathered) <= 2
    assert len(passes) == 2


def test_the_same_samples_give_the_same_bytes_and_products_of_one_weight_share_them() -> None:
    [once], [again] = (applied(chain(), samples=ragged, rounding="gptq") for _ in range(2))
    assert once.SerializeToString() == again.SerializeToString()
    first, second, _ = (node for node in once.graph.node if node.op_type == "MatMulNBits")
    assert first.input[1:] == second.input[1:]
    moments = Moments(chain(), {("x", "t"): 64}, ragged).of(("x", "t"))
    expected = rounded(heavy_tailed(64, 64).T, 4, WeightSettings(rounding="gptq"), moments)
    assert weights_of(once)["A.blocks"] == expected.numbers.tobytes()  # of the inputs of both
    [other] = applied(chain(), samples=lambda: ragged(1), rounding="gptq")
    assert weights_of(once) != weights_of(other)


# What is read in several places.


def generator() -> onnx.ModelProto:
    """A table of embeddings, a product, and the table again as output layer with a bias."""
    nodes = [
        helper.make_node("Gather", ["E", "tokens"], ["e"]),
        helper.make_node("MatMul", ["e", "M"], ["h"], name="middle"),
        helper.make_node("Transpose", ["E"], ["T"], perm=[1, 0]),
        helper.make_node("MatMul", ["h", "T"], ["z"], name="head"),
        helper.make_node("Add", ["z", "b"], ["logits"]),
    ]
    weights = {"E": heavy_tailed(100, 64), "M": heavy_tailed(64, 64, seed=1), "b": heavy_tailed(100, seed=2)}
    shapes = {"tokens": (TensorProto.INT64, ["batch", "time"])}, {"logits": (FLOAT, ["batch", "time", 100])}
    return make_model(nodes, weights, inputs=shapes[0], outputs=shapes[1])


def reader() -> onnx.ModelProto:
    """Another graph with the same table and the same product."""
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["e"]),
        helper.make_node("Relu", ["e"], ["r"]),
        helper.make_node("MatMul", ["r", "N"], ["n"], name="reading"),
        helper.make_node("Tanh", ["n"], ["memory"]),
    ]
    shapes = {"tokens": (TensorProto.INT64, ["batch", "time"])}, {"memory": (FLOAT, ["batch", "time", 64])}
    weights = {"table": heavy_tailed(100, 64), "N": heavy_tailed(64, 64, seed=1)}
    return make_model(nodes, weights, inputs=shapes[0], outputs=shapes[1])


def tokens() -> Iterator[dict[str, Array]]:
    return iter([{"tokens": np.arange(100).reshape(4, 25)}])


@pytest.mark.parametrize("rounding", ["hqq", "gptq"])
def test_what_is_read_in_several_places_is_the_same_bytes_in_all_of_them(rounding: str) -> None:
    first, second = (weights_of(model) for model in applied(generator(), reader(), samples=tokens, rounding=rounding))
    for part in ("blocks", "scales", "zeros"):
        assert first[f"E.table.{part}"] == first[f"E.transposed.{part}"] == second[f"table.table.{part}"]
        assert first[f"M.{part}"] == second[f"N.{part}"]


def test_a_matrix_of_one_graph_alone_is_rounded_from_samples() -> None:
    alone, without = (weights_of(applied(generator(), samples=tokens, rounding=way)[0]) for way in ("gptq", "hqq"))
    assert alone["M.blocks"] != without["M.blocks"]
    assert alone["E.table.blocks"] == without["E.table.blocks"]


def test_the_output_layer_and_what_is_tied_to_it_can_keep_eight_bits() -> None:
    assert set(bits_of(applied(generator())[0]).values()) == {4}
    [quantized] = applied(generator(), head="8")
    assert bits_of(quantized) == {"Gather_0": 8, "middle": 4, "head": 8}
    assert weights_of(quantized)["E.table.blocks"] == weights_of(quantized)["E.transposed.blocks"]


def test_a_matrix_in_several_graphs_is_not_taken_for_an_output_layer() -> None:
    first, second = applied(generator(), reader(), head="8")
    assert bits_of(first) == {"Gather_0": 8, "middle": 4, "head": 8}
    assert bits_of(second) == {"Gather_0": 8, "reading": 4}


def test_an_output_layer_that_is_not_tied_can_keep_eight_bits() -> None:
    model = generator()
    model.graph.initializer.append(onnx.numpy_helper.from_array(heavy_tailed(64, 100, seed=7), "T"))
    del model.graph.node[2]
    assert bits_of(applied(model, head="8")[0]) == {"Gather_0": 8, "middle": 4, "head": 8}
    assert bits_of(applied(model)[0]) == {"Gather_0": 8, "middle": 4, "head": 4}


def test_four_bits_are_fitted_unless_asked_otherwise_and_eight_are_not() -> None:
    weight = heavy_tailed(128, 24)
    for scheme, bits, rounding in (("int4-weights", 4, "hqq"), ("int8-weights", 8, "nearest")):
        expected = rounded(weight.T, bits, WeightSettings(rounding=rounding))
        assert weights_of(applied(product_model(weight), scheme=scheme)[0])["W.blocks"] == expected.numbers.tobytes()
        assert SCHEMES[scheme].settings.rounding == rounding


# Refusals.


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "block",
            "48",
            r"setting 'block' is 48, expected .* 16, 32, 64, 128, 256, or 0 to have it chosen; e\.g\. --set block=32",
        ),
        ("rounding", "up", r"setting 'rounding' is 'up', expected nearest, hqq or gptq; e\.g\. --set rounding=hqq"),
        ("head", "4", r"setting 'head' is '4', expected same, or 8 for an output layer of 8 bits; e\.g\. --set head=8"),
        ("symmetric", "half", r"setting 'symmetric' is 'half', expected true or false"),
    ],
)
def test_settings_that_do_not_exist_are_refused(key: str, value: str, message: str) -> None:
    for scheme in ("int8-weights", "int4-weights"):
        with pytest.raises(OptionError, match=message):
            apply_settings(SCHEMES[scheme].settings, {key: value})


def test_gptq_without_samples_is_refused() -> None:
    expected = "rounding=gptq needs samples .* pass --data FILE, or take --set rounding=hqq, which needs no samples"
    with pytest.raises(OptionError, match=expected):
        applied(chain(), rounding="gptq")


def test_samples_that_are_empty_or_not_finite_are_refused() -> None:
    with pytest.raises(DataError, match="there is no calibration data; pass --data with at least one sample"):
        applied(chain(), rounding="gptq", samples=lambda: iter(()))
    spoiled = [next(ragged()), {"x": np.full((1, 2, 64), np.nan, np.float32)}]
    with pytest.raises(DataError, match="calibration sample batch 2 gives NaN or infinite values in 'x'; look at the data"):
        applied(chain(), rounding="gptq", samples=lambda: iter(spoiled))
