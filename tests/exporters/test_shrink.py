import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from exporters.shrink import axes_that_matter, resized, shrink
from runtime.signature import GraphSignature, TensorSpec

_EXAMPLE = {"batch": 3, "time": 7}
_AXES = st.fixed_dictionaries({"batch": st.integers(1, 40), "time": st.integers(1, 40)})


def test_a_size_that_fails_between_sizes_that_pass_is_found() -> None:
    assert shrink(lambda sizes: sizes["batch"] in (5, 13), {"batch": 13, "time": 7}, _EXAMPLE) == {"batch": 5, "time": 1}


def test_an_axis_may_have_to_stay_large() -> None:
    assert shrink(lambda sizes: sizes["time"] > 20, {"batch": 3, "time": 33}, _EXAMPLE) == {"batch": 1, "time": 32}


def test_an_axis_without_guilt_does_not_hide_the_guilty_one() -> None:
    def fails(sizes: dict[str, int]) -> bool:
        return sizes["batch"] != 3

    smallest = shrink(fails, {"batch": 5, "time": 8}, _EXAMPLE)
    assert smallest == {"batch": 1, "time": 1}
    assert axes_that_matter(fails, smallest, _EXAMPLE) == ("batch",)


def test_two_axes_may_share_the_guilt() -> None:
    def fails(sizes: dict[str, int]) -> bool:
        return sizes["batch"] * sizes["time"] == 1

    assert axes_that_matter(fails, {"batch": 1, "time": 1}, _EXAMPLE) == ("batch", "time")


def test_no_axis_matters_where_the_example_fails_too() -> None:
    assert axes_that_matter(lambda sizes: True, {"batch": 1, "time": 1}, _EXAMPLE) == ()


def test_an_axis_that_is_the_sum_of_two_follows_them() -> None:
    def fails(sizes: dict[str, int]) -> bool:
        return sizes["total"] == sizes["past"] + sizes["time"] and sizes["past"] != 4

    example = {"batch": 3, "time": 5, "total": 9, "past": 4}
    smallest = shrink(fails, {"batch": 2, "time": 6, "total": 8, "past": 2}, example)
    assert smallest == {"batch": 1, "time": 1, "total": 2, "past": 1}
    assert axes_that_matter(fails, smallest, example) == ("past",)


@given(_AXES, st.sets(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=40))
def test_what_is_found_fails_and_is_no_larger_and_few_runs_are_needed(
    start: dict[str, int], failing: set[tuple[int, int]]
) -> None:
    runs = []

    def fails(sizes: dict[str, int]) -> bool:
        runs.append(sizes)
        return (sizes["batch"], sizes["time"]) in failing | {(start["batch"], start["time"])}

    found = shrink(fails, start, _EXAMPLE)
    assert fails(found)
    assert all(found[axis] <= start[axis] for axis in start)
    assert len(runs) <= 25


def test_inputs_are_cut_and_repeated_and_empty_ones_filled() -> None:
    signature = GraphSignature((TensorSpec("x", "float32", ("batch", 2)), TensorSpec("past", "float32", ("batch", "past"))), ())
    inputs = {"x": np.array([[1, 2], [3, 4]], np.float32), "past": np.zeros((2, 0), np.float32)}
    larger = resized(signature, inputs, {"batch": 3, "past": 2})
    assert larger["x"].tolist() == [[1, 2], [3, 4], [1, 2]]
    assert larger["past"].shape == (3, 2)
    assert resized(signature, inputs, {"batch": 1})["x"].tolist() == [[1, 2]]


def test_a_mask_is_cut_where_something_stays_visible() -> None:
    signature = GraphSignature((TensorSpec("mask", "bool", ("batch", "time")),), ())
    left = {"mask": np.array([[True] * 4, [False, False, False, True]])}
    assert resized(signature, left, {"time": 2})["mask"].tolist() == [[True, True], [False, True]]
    right = {"mask": np.array([[True] * 4, [True, False, False, False]])}
    assert resized(signature, right, {"time": 2})["mask"].tolist() == [[True, True], [True, False]]
