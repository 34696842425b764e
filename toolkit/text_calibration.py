"""The texts that a network on text is calibrated on: the user's own, or of the training part of what it was trained on."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from exporters.calibration import Feeds
from exporters.quantizers.scheme import Calibration
from exporters.rollouts import PROMPTS, ROWS, calibration_of_text
from runtime.bundle import DECODER, ENCODER, Bundle
from runtime.errors import DataError, OptionError
from runtime.state import SOURCE, TOKENS
from runtime.tokens import TokenInput, token_input

from .data.catalog import DATASETS
from .data.dataset import spread
from .data.text_data import Documents, TextData, TextPairs
from .text_evaluation import text_for

_CHARACTERS = 400  # of a stream for each prompt: more than it has tokens


def text_calibration(bundle: Bundle, path: str | None) -> Calibration:
    """Data that is named is read at once, so that a mistake in it is told at once; other data when it is needed."""
    if path is not None:
        return calibration_of_text(bundle, _texts(bundle, path))

    @cache
    def made() -> Calibration:
        return calibration_of_text(bundle, _texts(bundle, None))

    def calibration(graph: str) -> Iterable[Feeds]:
        return made()(graph)

    return calibration


def _texts(bundle: Bundle, path: str | None) -> list[list[int]] | None:
    """Token numbers; None: there are no texts, or nothing to read them with."""
    name = ENCODER if ENCODER in bundle.manifest.graphs else DECODER if DECODER in bundle.manifest.graphs else None
    reader = token_input(bundle, bundle.graph(name)[0], SOURCE if name == ENCODER else TOKENS)
    if reader is None or reader.tokenizer is None:
        if path is not None:
            raise OptionError(
                f"{bundle.root.name} has no tokenizer to read {path} with; leave --data out to calibrate on random tokens, or "
                "export it from a run, which has one"
            )
        return None
    if path is None and (bundle.manifest.data or {}).get("name") not in DATASETS:
        return None
    data, where = text_for(bundle, path, part="training")
    texts = [numbers for text in _chosen(data) if (numbers := _numbers(reader, text))]
    if not texts:
        raise DataError(f"{where} hold nothing to calibrate on: every text is empty; pass others with --data")
    return texts


def _chosen(data: TextData) -> list[str]:
    if isinstance(data, TextPairs):
        return [data.sources[place] for place in spread(len(data), ROWS)]
    if not isinstance(data, Documents):
        return [data.texts[place] for place in spread(len(data), ROWS)]
    stream = data.stream
    last = max(0, len(stream) - _CHARACTERS)
    starts = dict.fromkeys(last * place // max(1, PROMPTS - 1) for place in range(PROMPTS))
    return [stream[start : start + _CHARACTERS] for start in starts]


def _numbers(reader: TokenInput, text: str) -> list[int]:
    """As in training: a symbol that the vocabulary lacks is <unk>."""
    assert reader.tokenizer is not None
    numbers = reader.tokenizer.encode(text)
    return [*reader.before, *numbers, *reader.after] if numbers else []
