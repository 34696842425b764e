"""From a recipe's [data] section to what a task learns from: loaded, split, and, for text, cut into tokens.

Vocabularies come from the training part alone, as do the statistics of images and columns. A run that starts from an
earlier one takes over its vocabulary, and then a symbol outside it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from architectures.architecture import DataFacts
from architectures.raw_input import Preprocessing
from runtime.errors import DataError, FeedError
from runtime.text import UNK, Tokenizer

from .dataset import Dataset, DataSettings, split, split_rows
from .text_data import Documents, LabelledTexts, TextPairs, build_tokenizer
from .tokens import TokenPairs, TokenRows, Tokens, TokenStream, longest

_MOST_UNKNOWN = 0.3  # of the words
SENTENCE_SPECIALS = ("<cls>", "<sep>", "<mask>")

Data = Dataset | LabelledTexts | TextPairs | Documents


@dataclass(frozen=True)
class Prepared:
    """The three parts of the data, ready for a task, and what the network must know of them."""

    train: Any
    validation: Any
    test: Any
    facts: DataFacts
    rows: int
    unit: str = "rows"  # what the length of a part counts
    labels: tuple[str, ...] | None = None
    statistics: Preprocessing | None = field(default=None, repr=False)
    tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict, repr=False)


def prepare(
    data: Data, settings: DataSettings, *, task: str, sentences: bool = False, known: Mapping[str, Tokenizer] | None = None
) -> Prepared:
    """`sentences`: the network takes `<cls> text <sep>`. `known`: tokenizers to take over, which must fit the training part."""
    if isinstance(data, Dataset):
        return _samples(data, settings)
    if isinstance(data, TextPairs):
        return _pairs(data, settings, known or {})
    texts = data.texts
    classes = data.targets if isinstance(data, LabelledTexts) else None
    parts = split_rows(len(texts), settings, classes, name=data.name)  # the same for every task on the same data
    targets = classes if task == "classification" else None
    if task == "language-model":
        return _stream(Documents(data.name, texts), parts, settings, known or {})
    return _rows(data, parts, settings, known or {}, targets=targets, task=task, sentences=sentences)


def _samples(data: Dataset, settings: DataSettings) -> Prepared:
    parts = split(data, settings)
    facts = DataFacts(data.task, parts.statistics.shape, len(data.labels) if data.labels else 1, rows=len(parts.train))
    return Prepared(
        parts.train, parts.validation, parts.test, facts, len(data), labels=data.labels, statistics=parts.statistics
    )


def _rows(
    data: LabelledTexts | Documents,
    parts: Sequence[NDArray[np.int64]],
    settings: DataSettings,
    known: Mapping[str, Tokenizer],
    *,
    targets: NDArray[np.int64] | None,
    task: str,
    sentences: bool,
) -> Prepared:
    specials = SENTENCE_SPECIALS if sentences else ()
    unit = settings.unit or ("bpe" if sentences else "words")
    tokenizer = known.get("text") or build_tokenizer(
        [data.texts[row] for row in parts[0]],
        unit=unit,
        vocabulary=settings.vocabulary,
        specials=specials,
        minimum_count=settings.minimum_count,
    )
    encoded = _encode(tokenizer, data.texts)
    _check_known(tokenizer, "text" in known, [data.texts[row] for row in parts[0]])
    if sentences and task == "classification":
        first, last = tokenizer.token_id("<cls>"), tokenizer.token_id("<sep>")
        encoded = tuple((first, *sequence, last) for sequence in encoded)
    classes = np.zeros(len(encoded), dtype=np.int64) if targets is None else targets
    train, validation, test = (TokenRows(tuple(encoded[row] for row in part), classes[part]) for part in parts)
    labels = data.labels if isinstance(data, LabelledTexts) and targets is not None else None
    facts = DataFacts(
        task,
        outputs=len(labels) if labels else 1,
        rows=len(train),
        vocabulary=len(tokenizer),
        longest=longest(encoded) + (4 if task == "masked-lm" else 0),
    )
    return Prepared(train, validation, test, facts, len(data), labels=labels, tokenizers={"text": tokenizer})


def _stream(
    documents: Documents, parts: Sequence[NDArray[np.int64]], settings: DataSettings, known: Mapping[str, Tokenizer]
) -> Prepared:
    joined = [documents.rows(part).stream for part in parts]
    tokenizer = known.get("text") or build_tokenizer(
        [joined[0]], unit=settings.unit or "characters", vocabulary=settings.vocabulary
    )
    _check_known(tokenizer, "text" in known, joined[:1])
    streams = []
    for text in joined:
        (ids,) = _encode(tokenizer, (text,))
        if len(ids) < 20:
            raise DataError(f"a part of the data has only {len(ids)} tokens; expected a longer text, at least 20 in each part")
        streams.append(TokenStream(np.array(ids, dtype=np.int64), len(text)))
    facts = DataFacts("language-model", rows=len(streams[0]), vocabulary=len(tokenizer))
    train, validation, test = streams
    return Prepared(train, validation, test, facts, sum(map(len, joined)), "tokens", tokenizers={"text": tokenizer})


def _pairs(data: TextPairs, settings: DataSettings, known: Mapping[str, Tokenizer]) -> Prepared:
    parts = split_rows(len(data), settings, name=data.name)
    accepted = [target for row in parts[0] for target in data.targets[row]]
    source = known.get("source") or build_tokenizer(
        [data.sources[row] for row in parts[0]], unit=settings.unit or data.source_unit, vocabulary=settings.vocabulary
    )
    target = known.get("target") or build_tokenizer(
        accepted, unit=settings.unit or data.target_unit, vocabulary=settings.vocabulary
    )
    _check_known(source, "source" in known, [data.sources[row] for row in parts[0]])
    _check_known(target, "target" in known, accepted)
    sources = _encode(source, data.sources)
    targets = tuple(_encode(target, texts) for texts in data.targets)
    train, validation, test = (
        TokenPairs(tuple(sources[row] for row in part), tuple(targets[row] for row in part)) for part in parts
    )
    facts = DataFacts(
        "seq2seq",
        rows=len(train.rows),
        vocabulary=len(source),
        target_vocabulary=len(target),
        longest=max(longest(sources), *(longest(group) for group in targets)) + 2,
    )
    return Prepared(train, validation, test, facts, len(data), tokenizers={"source": source, "target": target})


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Tokens, ...]:
    return tuple(tuple(tokenizer.encode(text)) for text in texts)


def _check_known(tokenizer: Tokenizer, taken_over: bool, texts: Sequence[str]) -> None:
    """Refuse to train on symbols that a vocabulary of an earlier run lacks; of words, some are always unknown."""
    if not taken_over:
        return
    tokens = [token for text in texts for token in tokenizer.encode(text)]
    unknown = tokens.count(UNK)
    if unknown == 0 or (tokenizer.kind == "words" and unknown < _MOST_UNKNOWN * len(tokens)):
        return
    try:
        for text in texts:
            tokenizer.encode(text, strict=True)
    except FeedError as error:
        raise DataError(f"the data does not fit the vocabulary of the run to start from: {error}") from None
