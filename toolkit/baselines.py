"""What a network must beat: an n-gram model of characters, and logistic regression on word counts.

Interpolated Kneser–Ney (Kneser and Ney, "Improved backing-off for m-gram language modeling", 1995; Chen and Goodman, "An
empirical study of smoothing techniques for language modeling", 1999). For a context h and its shorter h' (the oldest
character dropped),

    p(c | h) = max(n(hc) − D, 0) / n(h·)  +  D · N(h·) / n(h·) · p(c | h')

where n counts occurrences at the highest order and, below it, the different characters that come before; n(h·) is the sum over
c, N(h·) how many different c follow, and D = n₁ / (n₁ + 2 n₂) of the n₁ n-grams counted once and the n₂ counted twice, one for
each order. Below the single character stands the uniform distribution over the vocabulary: the characters of the training text
and one for all others. The modified form has three discounts an order, for counts of 1, 2, and 3 or more.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from runtime.errors import DataError, MissingDependency, OptionError

from .data.dataset import DataSettings
from .data.text_data import LabelledTexts, split_texts

_UNKNOWN = "\uffff"  # no character: stands for all that the training text does not have
_STRENGTHS = (1.0, 10.0, 100.0, 1000.0, 10000.0)  # solved to the default tolerance: at 1e-3 large ones stop early and do worse


class KneserNey:
    """A character n-gram model of `order`, `modified` or with one discount an order.

    >>> KneserNey(order=3).fit("abracadabra").bits_per_character("abra") < 2
    True
    """

    def __init__(self, *, order: int = 6, modified: bool = False) -> None:
        if not 1 <= order <= 20:
            raise OptionError(f"an n-gram model of order {order} is not possible; expected 1 to 20")
        self.order = order
        self.modified = modified
        self.vocabulary: tuple[str, ...] = ()
        self._counts: list[dict[str, dict[str, int]]] = []  # by the length of the context: context → character → count
        self._discounts: list[tuple[float, float, float]] = []
        self._sums: list[dict[str, tuple[float, float]]] = []  # by length: context → (n(h·), the share left for h')

    def fit(self, text: str) -> KneserNey:
        if not text:
            raise DataError("the text to fit an n-gram model to is empty; expected at least one character")
        self.vocabulary = (*sorted(set(text) - {_UNKNOWN}), _UNKNOWN)
        self._counts = _count(text, self.order)
        self._discounts = [_discounts(counts, modified=self.modified) for counts in self._counts]
        self._sums = [
            {context: _sum(following, discounts) for context, following in counts.items()}
            for counts, discounts in zip(self._counts, self._discounts, strict=True)
        ]
        return self

    def probability(self, character: str, context: str) -> float:
        """Of `character` after `context`, of which the last order − 1 characters are looked at."""
        character = character if character in self._counts[0][""] else _UNKNOWN
        context = context[max(0, len(context) - self.order + 1) :]
        value = 1.0 / len(self.vocabulary)
        for length in range(len(context) + 1):
            shorter = context[len(context) - length :]
            sums = self._sums[length].get(shorter)
            if sums is None:
                break  # nor was any longer context seen
            total, rest = sums
            count = self._counts[length][shorter].get(character, 0)
            kept = count - self._discounts[length][min(count, 3) - 1] if count else 0.0
            value = kept / total + rest * value
        return value

    def bits_per_character(self, text: str) -> float:
        """The mean surprise at each character of `text`; the first have a shorter context."""
        if not text:
            raise DataError("the text to measure an n-gram model on is empty; expected at least one character")
        reach = self.order - 1
        nats = 0.0
        for place, character in enumerate(text):
            nats -= math.log(self.probability(character, text[max(0, place - reach) : place]))
        return nats / math.log(2) / len(text)


def _count(text: str, order: int) -> list[dict[str, dict[str, int]]]:
    """Occurrences for the longest context; for a shorter one, how many different characters stand before it."""
    tables: list[dict[str, dict[str, int]]] = [{} for _ in range(order)]
    grams = Counter(text[start : start + order] for start in range(len(text) - order + 1))
    for length in range(order - 1, -1, -1):
        table: dict[str, dict[str, int]] = defaultdict(dict)
        for gram, count in grams.items():
            table[gram[:-1]][gram[-1]] = count
        tables[length] = dict(table)
        shorter = Counter(gram[1:] for gram in grams)
        if 0 < length <= len(text):
            shorter[text[:length]] += 1  # nothing stands before it; it is counted as if something did
        grams = shorter
    return tables


def _discounts(counts: dict[str, dict[str, int]], *, modified: bool) -> tuple[float, float, float]:
    """What is taken from counts of 1, of 2, and of 3 or more."""
    sizes = Counter(count for following in counts.values() for count in following.values())
    once, twice, thrice, four = (sizes[size] for size in (1, 2, 3, 4))
    single = once / (once + 2 * twice) if once else 0.5  # a text too short for an estimate
    if not (modified and once and twice and thrice):
        return single, single, single
    raw = (1 - 2 * single * twice / once, 2 - 3 * single * thrice / twice, 3 - 4 * single * four / thrice)
    first, second, third = (min(max(value, 0.01), size - 0.01) for size, value in enumerate(raw, 1))
    return first, second, third


def _sum(following: dict[str, int], discounts: tuple[float, float, float]) -> tuple[float, float]:
    total = sum(following.values())
    return total, sum(discounts[min(count, 3) - 1] for count in following.values()) / total


@dataclass(frozen=True)
class TextBaseline:
    """Accuracy in percent, and the inverse regularisation C that did best on the validation part."""

    validation: float
    test: float
    strength: float
    features: int


def tfidf_accuracy(data: LabelledTexts, settings: DataSettings) -> TextBaseline:
    """TF-IDF of words and word pairs with logistic regression, trained on the training part of the same split."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise MissingDependency.of("scikit-learn", "data", "the TF-IDF baseline") from None
    train, validation, test = split_texts(data, settings)
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    inputs = vectorizer.fit_transform(train.texts)
    held_out, tested = vectorizer.transform(validation.texts), vectorizer.transform(test.texts)
    best: tuple[float, float, float] | None = None
    for strength in _STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=300).fit(inputs, train.targets)
        accuracies = [
            float(100 * np.mean(model.predict(features) == part.targets))
            for features, part in ((held_out, validation), (tested, test))
        ]
        if best is None or accuracies[0] > best[0]:
            best = accuracies[0], accuracies[1], strength
    assert best is not None
    return TextBaseline(best[0], best[1], best[2], inputs.shape[1])
