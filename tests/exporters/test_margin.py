import numpy as np

from exporters.margin import token_margin

_REFERENCE = np.array([[[0.0, 2.0, 1.0], [3.0, 2.999999, 0.0]]])


def test_equal_tokens_need_no_explanation() -> None:
    assert token_margin(_REFERENCE, _REFERENCE + 0.1) == ""


def test_a_margin_below_the_noise_is_a_tie() -> None:
    actual = _REFERENCE.copy()
    actual[0, 1, 1] += 3e-6
    assert token_margin(_REFERENCE, actual) == (
        "a tie within noise: 1 of 2 tokens differ, at worst token 1 instead of 0 at position 1, "
        "where the reference has a margin of 1.00e-06; error there 3.00e-06, allowed 6.00e-05"
    )


def test_a_margin_above_the_noise_is_a_bug_although_the_error_explains_it() -> None:
    actual = _REFERENCE.copy()
    actual[0, 0, 2] += 1.5
    assert token_margin(_REFERENCE, actual).startswith(
        "a bug: 1 of 2 tokens differ, at worst token 2 instead of 1 at position 0, "
        "where the reference has a margin of 1.00e+00; error there 1.50e+00"
    )


def test_the_widest_margin_decides() -> None:
    actual = _REFERENCE.copy()
    actual[0, 1, 1] += 3e-6
    actual[0, 0, 2] += 1.5
    assert token_margin(_REFERENCE, actual).startswith(
        "a bug: 2 of 2 tokens differ, at worst token 2 instead of 1 at position 0"
    )


def test_the_allowed_error_of_a_coarser_graph_makes_a_tie_of_a_wider_margin() -> None:
    actual = _REFERENCE.copy()
    actual[0, 0, 2] += 1.5
    assert token_margin(_REFERENCE, actual, allowed=0.6).startswith("a tie within noise")
    assert token_margin(_REFERENCE, actual, allowed=0.4).startswith("a bug")


def test_masked_tokens_do_not_widen_the_noise() -> None:
    masked = np.array([[-np.inf, 1.0, 0.5]])
    assert "error there 6.00e-01, allowed 2.00e-05" in token_margin(masked, np.array([[-np.inf, 0.4, 0.5]]))


def test_nan_is_a_bug_whichever_side_has_it() -> None:
    broken = np.full_like(_REFERENCE, np.nan)
    assert token_margin(_REFERENCE, broken) == "a bug: there are NaN among the logits, which no token can be chosen from"
    assert (
        token_margin(broken, _REFERENCE) == "a bug: the reference has NaN among the logits, which no token can be chosen from"
    )


def test_logits_of_another_shape_are_a_bug() -> None:
    assert token_margin(_REFERENCE, _REFERENCE[:, :1]) == "a bug: logits of shape [1, 1, 3] came out, expected [1, 2, 3]"
