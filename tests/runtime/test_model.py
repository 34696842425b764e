from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import runtime
from runtime.errors import DeviceError, FeedError, OptionError, UnknownName
from runtime.model import as_batch, softmax
from runtime.session import Session
from runtime.signature import TensorSpec

GREY = TensorSpec("pixels", "float32", ("batch", 1, 8, 8))
COLOUR = TensorSpec("pixels", "float32", ("batch", 3, 8, 8))
COLUMNS = TensorSpec("features", "float32", ("batch", 4))


@pytest.mark.parametrize(
    ("spec", "given", "expected"),
    [
        (GREY, (8, 8), (1, 1, 8, 8)),
        (GREY, (1, 8, 8), (1, 1, 8, 8)),
        (GREY, (5, 8, 8), (5, 1, 8, 8)),
        (GREY, (5, 1, 8, 8), (5, 1, 8, 8)),
        (COLOUR, (3, 8, 8), (1, 3, 8, 8)),
        (COLOUR, (2, 3, 8, 8), (2, 3, 8, 8)),
        (COLUMNS, (4,), (1, 4)),
        (COLUMNS, (0, 4), (0, 4)),
        (COLUMNS, (7, 4), (7, 4)),
    ],
)
def test_one_sample_and_batches_become_a_batch(spec: TensorSpec, given: tuple, expected: tuple) -> None:
    batch = as_batch(spec, np.zeros(given, np.float64))
    assert batch.shape == expected
    assert batch.dtype == np.float32


@pytest.mark.parametrize(
    ("spec", "values", "message"),
    [
        (COLOUR, np.zeros((8, 8)), "expected one sample of"),
        (COLUMNS, np.zeros(3), "expected one sample of"),
        (COLUMNS, ["a", "b", "c", "d"], "expected numbers"),
        (COLUMNS, [[1, 2, 3, 4], [1, 2]], "same shape"),
        (COLUMNS, np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]]), "has the value nan in sample 1, which is not a finite float32"),
    ],
)
def test_values_that_do_not_fit_are_refused(spec: TensorSpec, values: object, message: str) -> None:
    with pytest.raises(FeedError, match=message):
        as_batch(spec, values)


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("int64", 1.7, "int64 cannot hold exactly"),
        ("uint8", -1, "uint8 cannot hold"),
        ("uint8", 300, "uint8 cannot hold"),
        ("float32", 1e300, "not a finite"),
    ],
)
def test_values_are_never_cut_or_wrapped(dtype: str, value: float, message: str) -> None:
    spec = TensorSpec("x", dtype, ("batch", 1))
    with pytest.raises(FeedError, match=message):
        as_batch(spec, np.array([[1], [value]]))
    assert as_batch(spec, np.array([[1.0], [2.0]])).dtype == dtype


def test_softmax_is_stable_and_sums_to_one() -> None:
    probabilities = softmax(np.array([[1e4, 1e4 - 1, -1e4]], np.float32))
    np.testing.assert_allclose(probabilities.sum(axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(probabilities[0, 0] / probabilities[0, 1], np.e, rtol=1e-4)


def test_run_takes_and_gives_named_tensors(bundle: Path) -> None:
    model = runtime.load(bundle)
    outputs = model.run({"x": np.ones((6, 4), np.float32)})
    assert {name: array.shape for name, array in outputs.items()} == {"y": (6, 3)}
    with pytest.raises(OptionError, match="use run"):
        model.predict(np.zeros((1, 4)))


def test_classification_gives_labels_and_probabilities(exported: Callable[[str], Path]) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    model = runtime.load(exported("softmax"))
    one = model.predict(digits.images[0])
    assert one.label == str(digits.target[0])
    many = model.predict(digits.images[:20])
    assert len(many) == 20
    assert many.probabilities is not None
    np.testing.assert_allclose(many.probabilities.sum(axis=-1), 1, rtol=1e-5)
    with pytest.raises(FeedError, match="read .labels"):
        _ = many.label
    with pytest.raises(FeedError, match="this is a classification"):
        _ = one.value


def test_regression_gives_values_in_the_targets_unit(exported: Callable[[str], Path]) -> None:
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    prediction = runtime.load(exported("linear")).predict(data.data)
    assert prediction.values is not None
    assert abs(prediction.values.mean() - data.target.mean()) < 10
    with pytest.raises(FeedError, match="this is a regression"):
        _ = prediction.label
    assert isinstance(runtime.load(exported("linear")).predict(data.data[0]).value, float)


def test_a_device_that_is_not_there_is_a_warning_or_an_error(bundle: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"'cuda' could not be used and the model runs on cpu; install onnxruntime-gpu"):
        assert runtime.load(bundle, device="cuda").device == "cpu"
    with pytest.raises(DeviceError, match="could not be used"):
        runtime.load(bundle, device="cuda:1", strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime.load(bundle, device="auto").device == "cpu"
    with pytest.raises(UnknownName, match="did you mean 'cuda'"):
        runtime.load(bundle, device="cudda")


def test_a_graph_that_fails_inside_onnxruntime_is_told_in_one_line(bundle: Path) -> None:
    opened = runtime.Bundle.open(bundle)
    session = Session(opened.graph_path(), opened.graph()[1].signature)
    with pytest.raises(FeedError, match="onnxruntime could not run") as caught:
        session.run_unchecked({"x": np.ones((2, 5), np.float32)})
    assert "\n" not in str(caught.value)
