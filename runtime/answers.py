"""One answer for each sample: raw numbers or texts through the only graph of a bundle, in batches, the order kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import FeedError
from .samples import check_finite, groups_of
from .session import Session
from .signature import TensorSpec
from .state import TOKENS
from .tokens import TokenInput

SEGMENTS = "segments"


@dataclass(frozen=True)
class Answerer:
    """`reader` is how texts get in, for networks that take them. The answer is the graph's first output."""

    session: Session
    reader: TokenInput | None

    def answers(self, inputs: Any) -> tuple[NDArray[Any], bool]:
        """The answers (batch, …), and whether there was one sample that was not in a list."""
        if isinstance(inputs, Mapping):
            return self._by_name(inputs), False
        if self.reader is not None:
            rows, one = self.reader.read(inputs)
            parts = [(places, self.of_tokens(tokens)) for places, tokens in self.reader.batches(rows)]
        else:
            if isinstance(inputs, str) or (isinstance(inputs, Sequence) and inputs and isinstance(inputs[0], str)):
                raise FeedError("this network does not take text; pass numbers, or a dict of all inputs by name")
            spec = self._only_input()
            groups = groups_of(spec, inputs)
            one = len(groups) == 1 and len(groups[0][0]) == 1 and np.ndim(inputs) < len(spec.shape)
            parts = [(places, self._run({spec.name: batch})) for places, batch in groups]
        found = {place: output[at] for places, output in parts for at, place in enumerate(places)}
        if len({output.shape for output in found.values()}) > 1:
            raise FeedError("samples of different sizes give answers of different shapes here; pass one at a time, or use run")
        return np.stack([found[place] for place in range(len(found))]), one

    def of_tokens(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """The answers for padded tokens (batch, time). All of a text belongs to its first segment."""
        feeds = {TOKENS: tokens}
        for spec in self.session.signature.inputs:
            if spec.name == SEGMENTS:
                feeds[SEGMENTS] = np.zeros(tokens.shape, dtype=spec.dtype)
            elif spec.name != TOKENS:
                self._only_input()
        return self._run(feeds)

    def _by_name(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        self.session.signature.check_feeds(inputs)
        for name, array in inputs.items():
            if not array.size:
                raise FeedError(f"{name!r} is empty, of shape {list(array.shape)}; expected at least one sample")
            check_finite(name, array)
            if name == TOKENS and self.reader is not None:
                self.reader.check_vocabulary(array, f"{name!r}")
        return self._run(inputs)

    def _run(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        return self.session.run(feeds)[self.session.signature.outputs[0].name]

    def _only_input(self) -> TensorSpec:
        inputs = self.session.signature.inputs
        if len(inputs) != 1:
            raise FeedError(f"this model takes several inputs; pass a dict with: {', '.join(spec.name for spec in inputs)}")
        return inputs[0]
