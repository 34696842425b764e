"""Masked words: what a network that was trained to fill them in takes each <mask> of a text for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .answers import Answerer
from .errors import FeedError, OptionError
from .prediction import softmax
from .text import SPECIALS, Tokenizer
from .tokens import TokenInput, Tokens

MASK = "<mask>"


@dataclass(frozen=True)
class Candidate:
    text: str
    token: int
    probability: float


@dataclass(frozen=True)
class Filling:
    """`text` has the likeliest token in the place of every mask; `masks` has the candidates of each, the likeliest first."""

    text: str
    masks: tuple[tuple[Candidate, ...], ...]


def fill_texts(answerer: Answerer, texts: Any, top: int) -> list[Filling]:
    """For each text what its masks are taken for, from the network's logits (batch, time, vocabulary)."""
    reader = answerer.reader
    if reader is None or reader.tokenizer is None or MASK not in reader.tokenizer.specials:
        raise FeedError(f"this bundle has no tokenizer with {MASK}; use run with token numbers")
    if top < 1:
        raise OptionError(f"top is {top}, expected 1 or more")
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise FeedError(f"fill takes a text or a list of texts with {MASK} in them; use run with token numbers")
    rows, _ = reader.read([_encoded(reader, text, f"text {place}") for place, text in enumerate(texts)])
    found: dict[int, Filling] = {}
    for places, tokens in reader.batches(rows):
        logits = answerer.of_tokens(tokens)
        found |= {place: _filled(reader.tokenizer, rows[place], logits[at], top) for at, place in enumerate(places)}
    return [found[place] for place in range(len(rows))]


def _encoded(reader: TokenInput, text: str, name: str) -> Tokens:
    """The numbers of `text` with its masks, which the tokenizer alone would read as letters."""
    tokenizer = reader.tokenizer
    assert tokenizer is not None
    if MASK not in text:
        raise FeedError(f"{name} has no {MASK}; write one for each token to be filled in")
    *pieces, last = text.split(MASK)
    numbers = list(reader.before)
    for piece in pieces:
        # A byte-pair token has the space before its word within it.
        before = piece.removesuffix(" ") if tokenizer.kind == "bpe" else piece
        numbers += [*tokenizer.encode(before), tokenizer.token_id(MASK)]
    return [*numbers, *tokenizer.encode(last), *reader.after]


def _filled(tokenizer: Tokenizer, tokens: Tokens, logits: NDArray[Any], top: int) -> Filling:
    """From the logits (time, vocabulary) of one row."""
    mask = tokenizer.token_id(MASK)
    first = len(SPECIALS) + len(tokenizer.specials)
    filled, masks = list(tokens), []
    for place, token in enumerate(tokens):
        if token != mask:
            continue
        probabilities = softmax(logits[place])
        order = np.argsort(-probabilities[first:], kind="stable")[:top] + first  # special tokens are not words
        filled[place] = int(order[0])
        masks.append(
            tuple(Candidate(tokenizer.decode([number]), int(number), float(probabilities[number])) for number in order)
        )
    return Filling(tokenizer.decode(filled), tuple(masks))
