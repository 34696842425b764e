"""Learning byte-pair merges with the `tokenizers` library, for the runtime's tokenizer, which applies them without it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from runtime.errors import MissingDependency, OptionError
from runtime.text import SPECIALS, WORD, Tokenizer


def train_bpe(texts: Iterable[str], *, vocabulary: int = 1000, specials: Sequence[str] = ()) -> Tokenizer:
    """At most `vocabulary` tokens: the special ones, 256 bytes, and merges while a pair occurs twice or more."""
    library = _train(texts, vocabulary, (*SPECIALS, *specials))
    model = json.loads(library.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return Tokenizer("bpe", tuple(tokens), tuple(specials), tuple((left, right) for left, right in model["merges"]))


def _train(texts: Iterable[str], vocabulary: int, first: tuple[str, ...]) -> Any:
    """The library's own tokenizer; it cuts text into words as the runtime does."""
    smallest = len(first) + 256
    if vocabulary < smallest:
        raise OptionError(
            f"a bpe vocabulary of {vocabulary} is too small; expected {smallest} or more: all bytes must be in it"
        )
    try:
        from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as LibraryTokenizer
    except ImportError:
        raise MissingDependency.of("tokenizers", "text", "learning byte pairs") from None
    library = LibraryTokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(library_pattern()), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=list(first),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return library


def library_pattern() -> str:
    r"""WORD in the library's dialect, which writes \U0010ffff as \x{10ffff}."""
    return WORD.replace(r"\x80-\U0010ffff", r"\x{80}-\x{10ffff}")
