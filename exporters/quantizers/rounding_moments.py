"""Second moments XᵀX of the inputs X of matrix products, streamed over the samples.

A graph may have hundreds of products, and the moments of one of 3072 inputs take 38 MB. So they are gathered in groups, in the
order in which they will be asked for: each group is one pass over the samples, and is forgotten when the next one begins.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from runtime.errors import DataError

from ..calibration import Samples, session_for
from .blocks import Array

Inputs = tuple[str, ...]  # the tensors that one weight is multiplied with: several where products share it

_AT_ONCE = 256 << 20  # bytes of moments in a group


class Moments:
    def __init__(self, model: onnx.ModelProto, widths: Mapping[Inputs, int], samples: Samples) -> None:
        """`widths`: how many inputs a product has, in the order in which `of` will be asked."""
        self._model, self._widths, self._samples = model, widths, samples
        self._waiting = list(widths)
        self._gathered: dict[Inputs, Array] = {}

    def of(self, inputs: Inputs) -> Array:
        """float32 (width, width), summed up over all of `inputs`."""
        if inputs not in self._gathered:
            group = self._next_group(self._waiting.index(inputs))
            self._gathered = {}  # before the next ones take their room
            self._gathered = self._gather(group)
        return self._gathered[inputs]

    def _next_group(self, start: int) -> list[Inputs]:
        """From here on as many as there is room for, and one at least."""
        end, room = start, _AT_ONCE
        while end < len(self._waiting) and (end == start or room >= 4 * self._widths[self._waiting[end]] ** 2):
            room -= 4 * self._widths[self._waiting[end]] ** 2
            end += 1
        return self._waiting[start:end]

    def _gather(self, group: list[Inputs]) -> dict[Inputs, Array]:
        names = list(dict.fromkeys(name for inputs in group for name in inputs))
        given = {value.name for value in self._model.graph.input}
        computed = [name for name in names if name not in given]
        session = session_for(self._model, computed) if computed else None
        totals = {inputs: np.zeros((self._widths[inputs],) * 2, np.float32) for inputs in group}
        rows = dict.fromkeys(group, 0)
        for number, feeds in enumerate(self._samples(), 1):
            answers = () if session is None else session.run(computed, dict(feeds))
            found = dict(feeds) | dict(zip(computed, answers, strict=True))
            for inputs in group:
                for name in inputs:
                    values = found[name].reshape(-1, self._widths[inputs])
                    totals[inputs] += values.T @ values
                    rows[inputs] += len(values)
                if not np.isfinite(totals[inputs]).all():
                    raise DataError(
                        f"calibration sample batch {number} gives NaN or infinite values in {inputs[0]!r}; look at the data"
                    )
        if not all(rows.values()):
            raise DataError("there is no calibration data; pass --data with at least one sample")
        return totals
