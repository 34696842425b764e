"""Texts as the token numbers a network takes: encoded, checked, padded, and cut into batches.

Special tokens are put around a text as they were in training. Token numbers are taken as they are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bundle import Bundle
from .errors import FeedError
from .signature import TensorSpec
from .text import PAD, Tokenizer

TOKENS_AT_ONCE = 1 << 14  # bounds the memory of a run, whatever the number of texts

Tokens = list[int]


@dataclass(frozen=True)
class TokenInput:
    """One input (batch, time) of token numbers. What is None is not known, or there is no such thing."""

    spec: TensorSpec
    tokenizer: Tokenizer | None = None
    vocabulary: int | None = None
    pad: int | None = None
    longest: int | None = None
    before: tuple[int, ...] = ()  # <cls>
    after: tuple[int, ...] = ()  # <sep>, or <eos> of a source

    def read(self, values: Any, *, unread: int = 0) -> tuple[list[Tokens], bool]:
        """Rows of numbers from a text, token numbers, or a list of either; and whether it was only one.

        The network is not shown the last `unread` of them, so that there may be as many more.
        """
        one = isinstance(values, str) or (
            len(np.shape(values)) == 1 if isinstance(values, np.ndarray) else bool(_plain(values)) and _is_number(values[0])
        )
        items = [values] if one else list(values) if isinstance(values, Sequence | np.ndarray) else None
        if items is None:
            raise FeedError(f"a {type(values).__name__} is not a text; expected a text, token numbers, or a list of them")
        if not items:
            raise FeedError("the batch holds no texts; expected at least one")
        return [self.row(item, "the text" if one else f"text {place}", unread) for place, item in enumerate(items)], one

    def row(self, item: Any, name: str, unread: int = 0) -> Tokens:
        if isinstance(item, str):
            numbers = [*self.before, *self.encode(item, name), *self.after]
        else:
            numbers = self.numbers(item, name)
        self.check_length(len(numbers), name, unread)
        return numbers

    def encode(self, text: str, name: str = "the text") -> Tokens:
        if self.tokenizer is None:
            raise FeedError(f"{name} cannot be encoded: this bundle has no tokenizer; pass token numbers")
        # A character that training never saw has no meaning at all; rare words were trained as <unk>.
        numbers = self.tokenizer.encode(text, strict=self.tokenizer.kind == "characters")
        if not numbers:
            raise FeedError(f"{name} is empty; expected at least one token")
        return numbers

    def numbers(self, item: Any, name: str) -> Tokens:
        """Token numbers as they were given, without padding at the end."""
        if isinstance(item, Sequence | np.ndarray) and not len(item):
            raise FeedError(f"{name} is empty; expected at least one token")
        array = np.asarray(item) if _plain(item) else np.asarray(None)
        if array.ndim != 1 or array.dtype.kind not in "iuf" or (array.size and not _whole(array)):
            raise FeedError(f"{name} is {_shown(item)}; expected a text or whole token numbers")
        row: Tokens = array.astype(np.int64).tolist()
        while row and row[-1] == self.pad:
            row.pop()
        if not row:
            raise FeedError(f"{name} is empty; expected at least one token")
        self.check_vocabulary(np.asarray(row), name)
        return row

    def check_vocabulary(self, numbers: NDArray[Any], name: str) -> None:
        """Negative numbers too: a graph would count them from the end of its table."""
        wrong = numbers < 0
        if self.vocabulary is not None:
            wrong = wrong | (numbers >= self.vocabulary)
        if wrong.any():
            known = "0 or more" if self.vocabulary is None else f"0 to {self.vocabulary - 1}"
            raise FeedError(f"{name} has the token {numbers[wrong].flat[0]}, which does not exist; token numbers are {known}")

    def check_length(self, length: int, name: str, unread: int = 0) -> None:
        most = [size + unread for size in (self.longest, self._fixed(1)) if size is not None]
        if most and length > min(most):
            raise FeedError(f"{name} has {length} tokens, and this network takes {min(most)} at most; shorten it")

    def batches(self, rows: Sequence[Tokens], limit: int = TOKENS_AT_ONCE) -> Iterator[tuple[list[int], NDArray[Any]]]:
        """(places of the rows, padded tokens) of at most `limit` tokens each, rows of similar length together.

        Where the graph has a fixed batch the last one repeats a row: there may be more rows than places.
        """
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        while order:
            chosen = [order.pop()]  # the longest that is left
            time = self._fixed(1) or len(rows[chosen[0]])
            most = self._fixed(0) or max(1, limit // time)
            while order and len(chosen) < most and (self.pad is not None or len(rows[order[-1]]) == len(rows[chosen[0]])):
                chosen.append(order.pop())
            yield chosen, self.padded([rows[place] for place in chosen], time)

    def padded(self, rows: Sequence[Tokens], time: int) -> NDArray[Any]:
        """(batch, time), padded on the right."""
        filled = list(rows) + [rows[0]] * max(0, (self._fixed(0) or 0) - len(rows))
        if self.pad is None and any(len(row) != time for row in filled):
            raise FeedError(
                f"the graph takes {time} tokens, and this network has no padding to fill {len(filled[0])} up with; "
                f"pass {time} tokens"
            )
        batch = np.full((len(filled), time), self.pad or 0, dtype=self.spec.dtype)
        for place, row in zip(batch, filled, strict=True):
            place[: len(row)] = row
        return batch

    def _fixed(self, axis: int) -> int | None:
        size = self.spec.shape[axis]
        return size if isinstance(size, int) else None


def token_input(bundle: Bundle, graph: str, name: str) -> TokenInput | None:
    """How texts get into input `name` of `graph`; None if it does not take tokens."""
    manifest = bundle.manifest
    signature = manifest.graphs[graph].signature
    spec = next((spec for spec in signature.inputs if spec.name == name), None)
    about = _about(bundle)
    if spec is None or len(spec.shape) != 2 or not spec.dtype.startswith("int") or about is None:
        return None
    if signature.states:  # a decoder with a fixed time takes so many at a time, not at most
        spec = TensorSpec(spec.name, spec.dtype, (spec.shape[0], "time"))
    tokenizer = _tokenizer(bundle, name)
    logits = next((output for output in signature.outputs if output.name == "logits" and len(output.shape) == 3), None)
    vocabulary = about.get("vocabulary")
    if tokenizer is not None:
        vocabulary = len(tokenizer)
    elif logits is not None and isinstance(logits.shape[2], int):
        vocabulary = logits.shape[2]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    if tokenizer is not None and {"<cls>", "<sep>"} <= set(tokenizer.specials):
        before, after = (tokenizer.token_id("<cls>"),), (tokenizer.token_id("<sep>"),)
    if manifest.task == "seq2seq" and name == "source" and about.get("eos") is not None:
        after = (about["eos"],)
    return TokenInput(spec, tokenizer, vocabulary, about.get("pad"), about.get("longest"), before, after)


def _about(bundle: Bundle) -> dict[str, Any] | None:
    """What the manifest says of the network's tokens; None if it does not take any."""
    manifest = bundle.manifest
    if manifest.generation is not None:
        return dict(manifest.generation)
    if manifest.preprocessing is not None:
        return dict(manifest.preprocessing) if manifest.preprocessing.get("kind") == "tokens" else None
    return {"pad": PAD} if manifest.tokenizers else None


def _tokenizer(bundle: Bundle, name: str) -> Tokenizer | None:
    files = bundle.manifest.tokenizers
    file = files.get("source" if name == "source" else "target") or files.get("text")
    return None if file is None else Tokenizer.open(bundle.root / file)


def _plain(values: Any) -> bool:
    return isinstance(values, Sequence | np.ndarray) and not isinstance(values, str | bytes) and len(values) > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _whole(array: NDArray[Any]) -> bool:
    return array.dtype.kind != "f" or bool((np.isfinite(array) & (array == np.trunc(array))).all())


def _shown(item: Any) -> str:
    text = " ".join(repr(item).split())
    return text if len(text) <= 60 else text[:57] + "…"
