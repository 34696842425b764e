"""Second moments XᵀX of the inputs X of matrix products, streamed over the samples.

A graph may have hundreds of products, and the moments of one of 3072 inputs take 38 MB. So they are gathered in groups, in the
order in which they will be asked for: each group is one pass over the samples, and is forgotten when the next one begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime as ort

from runtime.errors import DataError

from ..graph import copy_of, drop_unread_weights
from .blocks import Array
from .scheme import Feeds, Samples

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
        session = _session_for(self._model, computed) if computed else None
        totals = {inputs: np.zeros((self._widths[inputs],) * 2, np.float32) for inputs in group}
        rows = dict.fromkeys(group, 0)
        for number, feeds in enumerate(self._samples(), 1):
            found = dict(feeds) | ({} if session is None else _run(session, computed, feeds))
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


def _run(session: ort.InferenceSession, names: Sequence[str], feeds: Feeds) -> dict[str, Array]:
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def _session_for(model: onnx.ModelProto, names: list[str]) -> ort.InferenceSession:
    """A session that computes these tensors, and nothing after the last of them."""
    part = copy_of(model)
    wanted = set(names)
    last = max(place for place, node in enumerate(part.graph.node) if wanted & set(node.output))
    del part.graph.node[last + 1 :]
    del part.graph.output[:]
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)  # onnxruntime infers the types
    drop_unread_weights(part)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(part.SerializeToString(), options, providers=["CPUExecutionProvider"])
