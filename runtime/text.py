r"""Tokenizers: text to token numbers and back, the same in training and on the device.

Three kinds of token:

    characters   each character
    words        what stands between white space; joined again by one space
    bpe          byte-level byte-pair encoding (Sennrich et al., "Neural machine translation of rare words with subword
                 units", 2016; over bytes as in Radford et al., "Language models are unsupervised multitask learners", 2019)

BPE first cuts the text into words by `WORD`: a run of letters, of digits or of punctuation, each with the one space before
it, or a run of white space without the space that belongs to the word after it. Every character outside ASCII counts as a
letter, so that the rule needs no Unicode tables and is the same in every regular-expression engine. The bytes of a word are
then joined pair by pair, the earliest learnt merge first. All 256 bytes are tokens: no text is ever unknown.

The first numbers are special tokens, which no text can produce: <pad> <bos> <eos> <unk>, then a network's own such as <mask>.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BundleError, FeedError, OptionError
from .files import write_file

KINDS = ("characters", "words", "bpe")
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(4)

_WHITE = r" \t\n\r\f\v"
WORD = (
    r" ?[^\x00-@\[-`{-\x7f]+"  # letters: A to Z, a to z, and all that is not ASCII
    r"| ?[0-9]+"
    rf"| ?[^{_WHITE}0-9A-Za-z\x80-\U0010ffff]+"  # punctuation and control characters
    rf"|[{_WHITE}]+(?= [^{_WHITE}])|[{_WHITE}]+"
)
_WORD = re.compile(WORD)
_FORMAT = 1
_CACHED_WORDS, _LONGEST_CACHED = 1 << 16, 64  # a long-running host must not collect every word it ever saw


def byte_symbols() -> tuple[str, ...]:
    """A printable character for each byte: itself where it is one, else from U+0100 on. (The alphabet of GPT-2.)"""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


@dataclass(frozen=True)
class Tokenizer:
    """`vocabulary` starts with the four special tokens and `specials`; `merges` (bpe) are pairs, the first learnt first.

    >>> letters = characters_of(["abba"])
    >>> letters.encode("bat"), letters.decode([5, 4])
    ([5, 4, 3], 'ba')
    """

    kind: str
    vocabulary: tuple[str, ...]
    specials: tuple[str, ...] = ()  # after the four that every tokenizer has
    merges: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(f"a tokenizer of kind {self.kind!r} is not known; expected {', '.join(KINDS)}")
        first = (*SPECIALS, *self.specials)
        if self.vocabulary[: len(first)] != first:
            raise OptionError(
                f"a vocabulary must start with {' '.join(first)}, but starts with {self.vocabulary[: len(first)]}"
            )
        if len(set(self.vocabulary)) != len(self.vocabulary) or "" in self.vocabulary:
            name = next(name for name, count in Counter(self.vocabulary).items() if count > 1 or not name)
            raise OptionError(f"a vocabulary's tokens must differ and not be empty, but it has {name!r}")
        if self.kind == "bpe":
            if missing := set(byte_symbols()) - set(self.vocabulary):
                raise OptionError(f"a bpe vocabulary must have all 256 bytes, but {len(missing)} are missing")
            for left, right in self.merges:
                if not {left, right, left + right} <= self._ids.keys():
                    raise OptionError(f"the merge {left!r} + {right!r} is of tokens that the vocabulary does not have")
        elif self.merges:
            raise OptionError(f"merges belong to a tokenizer of kind bpe, not {self.kind}")

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str, *, strict: bool = False) -> list[int]:
        """The token numbers of `text`, without <bos> and <eos>. What is unknown becomes <unk>, or with `strict` an error."""
        if self.kind == "bpe":
            return self._encode_bytes(text)
        tokens: Sequence[str] = text if self.kind == "characters" else text.split()
        ids = self._ids
        numbers = [ids.get(token, UNK) for token in tokens]
        if strict and UNK in numbers:
            unknown = tokens[numbers.index(UNK)]
            raise FeedError(
                f"{unknown!r} is outside the vocabulary of {len(self)} {self.kind}; "
                "use only what was in the training data, or train on data that has it"
            )
        return numbers

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token numbers, special tokens left out. Bytes that are not UTF-8 become U+FFFD."""
        first = len(SPECIALS) + len(self.specials)
        tokens = []
        for number in map(int, ids):
            if not 0 <= number < len(self.vocabulary):
                raise FeedError(f"there is no token {number}; the vocabulary has 0 to {len(self) - 1}")
            if number >= first:
                tokens.append(self.vocabulary[number])
        if self.kind == "bpe":
            return bytes(map(_BYTE_OF.__getitem__, "".join(tokens))).decode("utf-8", errors="replace")
        return (" " if self.kind == "words" else "").join(tokens)

    def token_id(self, name: str) -> int:
        """The number of a token by its name, special or not."""
        if name in (*SPECIALS, *self.specials):
            return self.vocabulary.index(name)
        if name not in self._ids:
            raise FeedError(f"there is no token {name!r} in the vocabulary of {len(self)} {self.kind} tokens")
        return self._ids[name]

    def to_json(self) -> str:
        content: dict[str, Any] = {
            "format": _FORMAT,
            "kind": self.kind,
            "specials": self.specials,
            "vocabulary": self.vocabulary,
        }
        if self.kind == "bpe":
            content["merges"] = [" ".join(pair) for pair in self.merges]  # no token holds a space: its symbol is U+0120
        return json.dumps(content, indent=0)

    @classmethod
    def from_json(cls, text: str | bytes, *, name: str = "the tokenizer") -> Tokenizer:
        """`name` is what an error calls it."""
        try:
            content = json.loads(text)
            if not isinstance(content, dict) or content.get("format") != _FORMAT:
                raise BundleError(f"{name} is not a tokenizer of format {_FORMAT}; write it again, or update edgekit")
            merges = [tuple(pair.split(" ")) for pair in _strings(content.get("merges", []))]
            if any(len(pair) != 2 for pair in merges):
                raise ValueError("a merge that is not a pair")
            vocabulary, specials = _strings(content["vocabulary"]), _strings(content["specials"])
            return cls(str(content["kind"]), vocabulary, specials, tuple((left, right) for left, right in merges))
        except (ValueError, KeyError, RecursionError, OptionError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
            raise BundleError(f"{name} is damaged ({reason}); write it again") from None

    def save(self, path: str | Path) -> None:
        write_file(Path(path), self.to_json())

    @classmethod
    def open(cls, path: str | Path) -> Tokenizer:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise BundleError(f"the tokenizer {path} cannot be read: {error.strerror or error}") from None
        return cls.from_json(content, name=f"the tokenizer {path}")

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Of what text can hold: special tokens are not among them."""
        first = len(SPECIALS) + len(self.specials)
        return {token: first + place for place, token in enumerate(self.vocabulary[first:])}

    @cached_property
    def _ranks(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For a pair of tokens the rank of its merge and the token it becomes."""
        ids = self._ids
        ranks: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, (left, right) in enumerate(self.merges):
            ranks.setdefault((ids[left], ids[right]), (rank, ids[left + right]))
        return ranks

    @cached_property
    def _words(self) -> dict[str, list[int]]:
        return {}

    def _encode_bytes(self, text: str) -> list[int]:
        words = self._words
        numbers: list[int] = []
        for word in _WORD.findall(text):
            found = words.get(word)
            if found is None:
                found = self._merge(word)
                if len(words) >= _CACHED_WORDS:
                    words.clear()
                if len(word) <= _LONGEST_CACHED:
                    words[word] = found
            numbers += found
        return numbers

    def _merge(self, word: str) -> list[int]:
        """Join the bytes of one word: always the earliest learnt merge, the leftmost of equals. O(n log n) by a heap."""
        try:
            numbers = [self._ids[_SYMBOLS[byte]] for byte in word.encode()]
        except UnicodeEncodeError as error:
            raise FeedError(
                f"the text holds {word[error.start]!r}, half of a surrogate pair; decode the text as UTF-8"
            ) from None
        ranks = self._ranks
        count = len(numbers)
        following, previous = list(range(1, count + 1)), list(range(-1, count - 1))
        heap: list[tuple[int, int, int, int, int]] = []  # (rank, place, left, right, merged)

        def offer(start: int, end: int) -> None:
            if start >= 0 and end < count and (found := ranks.get((numbers[start], numbers[end]))):
                heapq.heappush(heap, (found[0], start, numbers[start], numbers[end], found[1]))

        for place in range(count - 1):
            offer(place, place + 1)
        while heap:
            _, place, left, right, merged = heapq.heappop(heap)
            other = following[place]
            if numbers[place] != left or other >= count or numbers[other] != right:
                continue  # an earlier merge took one of the two
            numbers[place], numbers[other] = merged, -1
            following[place] = beyond = following[other]
            if beyond < count:
                previous[beyond] = place
            offer(previous[place], place)
            offer(place, beyond)
        return [number for number in numbers if number >= 0]


_SYMBOLS = byte_symbols()
_BYTE_OF = {symbol: byte for byte, symbol in enumerate(_SYMBOLS)}


def characters_of(texts: Iterable[str], *, specials: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of all the characters in `texts`, in the order of their code points."""
    found: set[str] = set()
    for text in texts:
        found.update(text)
    return Tokenizer("characters", (*SPECIALS, *specials, *sorted(found)), tuple(specials))


def words_of(texts: Iterable[str], *, specials: Sequence[str] = (), minimum_count: int = 1) -> Tokenizer:
    """A tokenizer of the words that `texts` hold at least `minimum_count` times: the frequent first, equals by text."""
    if minimum_count < 1:
        raise OptionError(f"minimum_count is {minimum_count}, expected 1 or more")
    first = (*SPECIALS, *specials)
    counts = Counter(word for text in texts for word in text.split())
    words = [word for word, count in counts.items() if count >= minimum_count and word not in first]
    return Tokenizer("words", (*first, *sorted(words, key=lambda word: (-counts[word], word))), tuple(specials))


def pad_batch(
    sequences: Sequence[Sequence[int]], *, bos: bool = False, eos: bool = False, left: bool = False
) -> NDArray[np.int64]:
    """Token numbers as one array (batch, time): <bos> before and <eos> after each if asked, <pad> at the right, or left."""
    longest = max(map(len, sequences), default=0) + bos + eos
    batch = np.full((len(sequences), longest), PAD, dtype=np.int64)
    for row, sequence in zip(batch, sequences, strict=True):
        length = len(sequence) + bos + eos
        place = row[longest - length :] if left else row[:length]
        place[int(bos) : int(bos) + len(sequence)] = sequence
        if bos:
            place[0] = BOS
        if eos:
            place[-1] = EOS
    return batch


def _strings(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("expected a list of texts")
    return tuple(values)
