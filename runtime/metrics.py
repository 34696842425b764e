"""Task metrics, in numpy. Each says its unit and which direction is better, so that a quality budget can be applied to any."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import OptionError

Values = NDArray[Any]
Tokens = Sequence[Hashable]  # words, phonemes or numbers; a text is a sequence of its characters


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    higher_is_better: bool
    default_budget: float  # the drop that is allowed when nobody says otherwise, in the unit of `drop`
    compute: Callable[[Values, Values], float]  # (outputs, targets)

    def drop(self, before: float, after: float) -> float:
        """Quality lost, in percent: points for a percentage, relative growth for an error. Negative is a gain."""
        if self.higher_is_better or self.unit == "%":
            return before - after if self.higher_is_better else after - before
        return 0.0 if before == after else 100.0 * (after - before) / max(abs(before), np.finfo(np.float64).tiny)


def accuracy(logits: Values, labels: Values) -> float:
    """Percent of rows whose largest logit is at the label."""
    return float(100.0 * np.mean(logits.argmax(axis=-1) == labels))


def mean_squared_error(values: Values, targets: Values) -> float:
    difference = values.reshape(len(values), -1)[:, 0].astype(np.float64) - targets
    return float(np.mean(difference**2))


def agreement(outputs: Values, reference: Values) -> float:
    """100 minus the relative L2 error in percent: 100 is equality. For networks without labelled data."""
    difference = outputs.astype(np.float64) - reference
    scale = float(np.linalg.norm(reference.astype(np.float64)))
    return float(100.0 * (1.0 - np.linalg.norm(difference) / scale)) if scale else float(100.0 * np.all(difference == 0))


def r2(values: Values, targets: Values) -> float:
    """Share of the targets' variance that is explained: 1 is perfect, 0 is no better than their mean; NaN if they are equal."""
    variance = float(np.var(targets.astype(np.float64)))
    return 1.0 - mean_squared_error(values, targets) / variance if variance else math.nan


def confusion_matrix(predicted: Values, targets: Values, classes: int) -> NDArray[np.int64]:
    """How often a row of class t was taken for class p, at [t, p]."""
    for name, numbers in (("predicted", predicted), ("targets", targets)):
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < classes):
            raise OptionError(f"{name} hold {numbers.min()} to {numbers.max()}, expected classes of 0 to {classes - 1}")
    places = targets.astype(np.int64) * classes + predicted.astype(np.int64)
    return np.bincount(places, minlength=classes * classes).reshape(classes, classes)


def cross_entropy(logits: Values, targets: Values, *, ignore: int | None = 0) -> tuple[float, int]:
    """The summed nats of `targets` (any shape) under `logits` (that shape, vocabulary), and their number without `ignore`."""
    counted = np.ones(targets.shape, dtype=bool) if ignore is None else targets != ignore
    chosen, wanted = logits[counted].astype(np.float64), targets[counted]
    if not len(wanted):
        return 0.0, 0
    highest = chosen.max(axis=-1)
    total = highest + np.log(np.exp(chosen - highest[:, None]).sum(axis=-1))  # log of the sum of exponentials, without overflow
    return float((total - chosen[np.arange(len(wanted)), wanted]).sum()), len(wanted)


def perplexity(nats: float, tokens: int) -> float:
    """e to the mean nats of a token: as unsure as a choice among so many."""
    mean = nats / tokens
    return math.exp(mean) if mean < 700 else math.inf


def bits_per_character(nats: float, characters: int) -> float:
    """Comparable between tokenizers, as perplexity is not: divide by the characters of the text, not by its tokens."""
    return nats / math.log(2) / characters


def edit_distance(first: Tokens, second: Tokens) -> int:
    """Least number of insertions, deletions and replacements that turn one into the other (Levenshtein, 1966)."""
    start, first_end, second_end = 0, len(first), len(second)
    while start < min(first_end, second_end) and first[start] == second[start]:
        start += 1
    while min(first_end, second_end) > start and first[first_end - 1] == second[second_end - 1]:
        first_end, second_end = first_end - 1, second_end - 1
    longer, shorter = first[start:first_end], second[start:second_end]
    if len(longer) < len(shorter):
        longer, shorter = shorter, longer
    if len(shorter) <= 1:
        return len(longer) - (len(shorter) == 1 and shorter[0] in longer)
    row = list(range(len(shorter) + 1))  # distances of what is read of `longer` to every beginning of `shorter`
    for read, token in enumerate(longer, 1):
        diagonal, row[0] = row[0], read
        for place, other in enumerate(shorter, 1):
            above = row[place]
            row[place] = diagonal if token == other else 1 + min(diagonal, above, row[place - 1])
            diagonal = above
    return row[-1]


def error_rate(predictions: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> float:
    """Edits to the nearest accepted reference (the first of equals), in percent of the tokens of those references.

    Of phonemes this is the phoneme error rate.
    """
    edits = tokens = 0
    for prediction, accepted in _with_references(predictions, references):
        distance, nearest = min(((edit_distance(prediction, reference), reference) for reference in accepted), key=_first)
        edits += distance
        tokens += len(nearest)
    return 100.0 * edits / tokens if tokens else 100.0 * bool(edits)


def word_error_rate(predictions: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> float:
    """Percent of predictions, each a word's, that equal none of their accepted references."""
    pairs = _with_references(predictions, references)
    wrong = sum(all(list(prediction) != list(reference) for reference in accepted) for prediction, accepted in pairs)
    return 100.0 * wrong / max(1, len(pairs))


def bleu(
    hypotheses: Sequence[Tokens],
    references: Sequence[Sequence[Tokens]],
    *,
    order: int = 4,
    smoothing: str = "exp",
) -> float:
    """BLEU of a corpus, 0 to 100 (Papineni et al., "BLEU: a method for automatic evaluation of machine translation", 2002).

    `references[i]` are the accepted ones of `hypotheses[i]`. With smoothing "exp" an order without a match counts as 1/2, 1/4,
    … of a match (Chen and Cherry, 2014, method 3; what sacrebleu does unless told otherwise); with "none" it makes BLEU 0.
    """
    if smoothing not in ("exp", "none"):
        raise OptionError(f"BLEU's smoothing is {smoothing!r}, expected 'exp' or 'none'")
    matches, totals = [0] * order, [0] * order
    length = reference_length = 0
    for hypothesis, accepted in _with_references(hypotheses, references):
        length += len(hypothesis)
        reference_length += min((abs(len(one) - len(hypothesis)), len(one)) for one in accepted)[1]  # nearest, then shortest
        for place in range(order):
            found = _ngrams(hypothesis, place + 1)
            allowed: Counter[tuple[Hashable, ...]] = Counter()
            for reference in accepted:
                allowed |= _ngrams(reference, place + 1)
            matches[place] += (found & allowed).total()
            totals[place] += found.total()
    if not any(matches) or 0 in totals or (smoothing == "none" and 0 in matches):
        return 0.0
    logarithm, credit = 0.0, 1.0
    for matched, total in zip(matches, totals, strict=True):
        if not matched:
            credit /= 2
        logarithm += math.log((matched or credit) / total)
    return 100.0 * math.exp(min(0.0, 1.0 - reference_length / length) + logarithm / order)


def bleu_d2l(prediction: Tokens, label: Tokens, order: int) -> float:
    """exp(min(0, 1 − len_label/len_pred)) ∏ p_n^(1/2^n) for n of 1 to `order`, as "Dive into Deep Learning" has it: 0 to 1."""
    if not prediction:
        return 0.0
    score = math.exp(min(0.0, 1.0 - len(label) / len(prediction)))
    for length in range(1, min(order, len(prediction)) + 1):
        found = _ngrams(prediction, length)
        score *= ((found & _ngrams(label, length)).total() / found.total()) ** 0.5**length
    return score


def _ngrams(tokens: Tokens, length: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(tokens[start : start + length]) for start in range(len(tokens) - length + 1))


def _with_references(
    predictions: Sequence[Tokens], references: Sequence[Sequence[Tokens]]
) -> list[tuple[Tokens, Sequence[Tokens]]]:
    if len(predictions) != len(references) or not all(references):
        raise OptionError(
            f"{len(predictions)} predictions have references for {sum(map(bool, references))}; give one or more for each"
        )
    return list(zip(predictions, references, strict=True))


def _first(pair: tuple[int, Tokens]) -> int:
    return pair[0]


METRICS = {
    "classification": Metric("accuracy", "%", True, 0.5, accuracy),
    "regression": Metric("mse", "", False, 2.0, mean_squared_error),
    "tensors": Metric("agreement", "%", True, 5.0, agreement),
}
