from __future__ import annotations

import numpy as np
import pytest

from runtime.errors import FeedError
from runtime.signature import GraphSignature, StateSpec, TensorSpec

TOKENS = TensorSpec("tokens", "int64", ("batch", "time"))
MASK = TensorSpec("mask", "bool", ("batch", "time"))
LOGITS = TensorSpec("logits", "float32", ("batch", "time", 7))
SIGNATURE = GraphSignature((TOKENS, MASK), (LOGITS,))


def feeds(batch: int = 2, time: int = 3) -> dict[str, np.ndarray]:
    return {"tokens": np.zeros((batch, time), np.int64), "mask": np.ones((batch, time), bool)}


def test_a_signature_survives_json() -> None:
    cache_in, cache_out = (
        TensorSpec("past", "float32", ("batch", 4, "past", 8)),
        TensorSpec("present", "float32", ("batch", 4, "all", 8)),
    )
    signature = GraphSignature((TOKENS, cache_in), (LOGITS, cache_out), (StateSpec("past", "present", 0, 2),))
    assert GraphSignature.from_json(signature.to_json()) == signature


def test_fitting_feeds_bind_the_named_sizes() -> None:
    assert SIGNATURE.check_feeds(feeds()) == {"batch": 2, "time": 3}
    assert SIGNATURE.dynamic_axes == ("batch", "time")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": None}, "input 'mask' is missing"),
        ({"masks": np.ones(1)}, "no input named 'masks'"),
        ({"tokens": np.zeros((2, 3), np.float32)}, r"dtype float32 but int64 is expected; convert it with .astype\(np.int64\)"),
        ({"tokens": np.zeros(3, np.int64)}, "which has 2 axes"),
        ({"tokens": np.zeros((2, 5), np.int64)}, "'time' is already 5"),
        ({"tokens": [[1, 2]]}, "expected a numpy array"),
    ],
)
def test_feeds_that_do_not_fit_are_refused_with_the_fix(change: dict, message: str) -> None:
    given = {name: array for name, array in (feeds() | change).items() if array is not None}
    with pytest.raises(FeedError, match=message):
        SIGNATURE.check_feeds(given)


def test_a_fixed_size_must_be_met() -> None:
    fixed = GraphSignature((TensorSpec("x", "float32", ("batch", 8)),), ())
    with pytest.raises(FeedError, match="axis 1 of 'x' is 7 but must be 8"):
        fixed.check_feeds({"x": np.zeros((1, 7), np.float32)})


def test_a_state_must_name_tensors_of_the_graph() -> None:
    with pytest.raises(FeedError, match="does not have"):
        GraphSignature((TOKENS,), (LOGITS,), (StateSpec("hidden", "logits", 0),))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(FeedError, match="complex64"):
        TensorSpec("x", "complex64", (1,))
