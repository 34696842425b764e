"""Why another token won: the margin between the two candidates, against the numeric error."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from runtime.verify import max_error

_USUAL_SHARE = 2e-5  # of the largest logit: ten times the largest error measured on correct float32 exports


def is_tie(margin: float, allowed: float) -> bool:
    """Whether two candidates that far apart may change places where each may be wrong by `allowed`."""
    return margin <= 2 * allowed


def token_margin(reference_logits: ArrayLike, actual_logits: ArrayLike, allowed: float | None = None) -> str:
    """Why the likeliest token differs: a tie within noise, or a bug; empty if it is the same everywhere.

    Logits are (…, vocabulary). A token changes only where the error exceeds half the margin between the two candidates, so the
    observed error alone explains every change, also a bug's; what decides is whether the margin is within the error *allowed*.
    """
    reference, actual = np.asarray(reference_logits, np.float64), np.asarray(actual_logits, np.float64)
    if reference.shape != actual.shape:
        return f"a bug: logits of shape {list(actual.shape)} came out, expected {list(reference.shape)}"
    for which, logits in (("the reference has", reference), ("there are", actual)):
        if np.isnan(logits).any():
            return f"a bug: {which} NaN among the logits, which no token can be chosen from"
    reference, actual = reference.reshape(-1, reference.shape[-1]), actual.reshape(-1, reference.shape[-1])
    wanted, got = reference.argmax(-1), actual.argmax(-1)
    rows = np.flatnonzero(wanted != got)
    if not rows.size:
        return ""
    margins = reference[rows, wanted[rows]] - reference[rows, got[rows]]
    worst = int(rows[margins.argmax()])
    margin, error = float(margins.max()), max_error(actual[worst], reference[worst])
    limit = _USUAL_SHARE * float(np.abs(reference[np.isfinite(reference)]).max(initial=0.0)) if allowed is None else allowed
    verdict = "a tie within noise" if is_tie(margin, limit) else "a bug"
    return (
        f"{verdict}: {rows.size} of {len(wanted)} tokens differ, at worst token {got[worst]} instead of {wanted[worst]} at "
        f"position {worst}, where the reference has a margin of {margin:.2e}; error there {error:.2e}, allowed {limit:.2e}"
    )
