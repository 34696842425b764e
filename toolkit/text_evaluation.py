"""How good a bundle of a network on text is, through the runtime, as it was judged in training.

A language model reads the held-out text as one stream: with a hidden state from end to end, with limited positions in windows
that show at least half as many tokens before each, where there are that many. An encoder–decoder decodes greedily. Where a
quantized decoder has a form for many rows it is that one that is judged, as it has the less exact weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bundle import DECODER, ENCODER, MANY, Bundle
from runtime.errors import DataError, OptionError
from runtime.metrics import bits_per_character, bleu, cross_entropy, error_rate, perplexity, word_error_rate
from runtime.model import Model
from runtime.state import SOURCE, TOKENS, initial_state, step
from runtime.tokens import TokenInput, token_input

from .data.catalog import DATASETS, load_data
from .data.dataset import DataSettings
from .data.text_data import LabelledTexts, TextData, split_texts

_PIECE = 512  # tokens of a stream that are read at once
_WINDOWS = 16
_TEXTS = 128  # that are decoded together

Progress = Callable[[int, int], None]
Metrics = dict[str, float]


def evaluate_text(
    bundle: Bundle, path: str | None, *, device: str, threads: int | None, progress: Progress
) -> tuple[Metrics, int, str]:
    """The metrics, over how many texts (characters, of a language model), and of what data."""
    task, measure = bundle.manifest.task, _MEASURES.get(bundle.manifest.task)
    if measure is None:
        raise OptionError(f"there is no metric for the task {task!r} yet; edgekit verify replays the goldens of this bundle")
    if not bundle.manifest.tokenizers:
        raise OptionError(f"{bundle.root.name} has no tokenizer to read texts with; export it from a run, which has one")
    data, where = text_for(bundle, path)
    model = Model(bundle, device=device, threads=threads, many_rows=True)
    metrics, rows = measure(model, data, progress)
    return metrics, rows, where


def measure_text(model: Model, data: TextData) -> tuple[Metrics, int]:
    """The metrics of a model's task on these texts, and over how many."""
    return _MEASURES[model.bundle.manifest.task](model, data, lambda done, total: None)


def text_for(bundle: Bundle, path: str | None, part: str = "test") -> tuple[TextData, str]:
    """The held-out part of what a bundle was trained on, or the "training" part; or all texts of another file."""
    recorded = bundle.manifest.data or {}
    known = {item.name for item in fields(DataSettings)}
    settings = DataSettings(**{key: value for key, value in recorded.items() if key in known and value is not None})
    settings = replace(settings, path=path, columns=tuple(settings.columns))
    if path is None and settings.name not in DATASETS:
        trained = f"was trained on {settings.name}; pass it, or" if settings.name else "does not say its data; pass"
        raise OptionError(f"{bundle.root.name} {trained} data of that kind with --data PATH")
    task = bundle.manifest.task
    data: Any = load_data(replace(settings, limit=None, task=None), tasks=(task,), takes=("tokens",))
    used = data.limited(settings.limit) if settings.limit else data
    if recorded.get("fingerprint") == used.fingerprint:
        found = split_texts(used, settings)[0 if part == "training" else 2]
        return found, f"the {part} part of {used.name}, {len(found)} texts"
    if path is None:
        raise DataError(f"{data.name} is not the data the network was trained on any more; pass data with --data PATH")
    return data, f"all {len(data)} texts of {Path(path).name}"


def _language_model(model: Model, data: Any, progress: Progress) -> tuple[Metrics, int]:
    text = (data.documents() if isinstance(data, LabelledTexts) else data).stream
    reader = token_input(model.bundle, DECODER, TOKENS)
    assert reader is not None
    ids = _numbers(reader, [text])[0]
    window = _window(model.bundle)
    nats = _nats_of_stream(model, ids, progress) if window is None else _nats_of_windows(model, ids, window, progress)
    return {"bpc": bits_per_character(nats, len(text)), "perplexity": perplexity(nats, len(ids) - 1)}, len(text)


def _window(bundle: Bundle) -> int | None:
    """The positions it was trained at, not all that it has; None: it carries a state without end."""
    longest: int | None = (bundle.manifest.generation or {}).get("longest")
    recipes = [item["source"].get("recipe", {}) for item in bundle.manifest.lineage if isinstance(item.get("source"), Mapping)]
    trained = [recipe["training"]["window"] for recipe in recipes if "training" in recipe]
    return longest and min([longest, *trained])


def _nats_of_stream(model: Model, ids: Sequence[int], progress: Progress) -> float:
    session = model.sessions.get(MANY, model.sessions[DECODER])
    tokens, state, total = np.array([ids], np.int64), initial_state(session.signature, 1), 0.0
    for start in range(0, len(ids) - 1, _PIECE):
        end = min(start + _PIECE, len(ids) - 1)
        logits, state = step(session, tokens[:, start:end], state)
        total += cross_entropy(logits, tokens[:, start + 1 : end + 1], ignore=None)[0]
        progress(end, len(ids) - 1)
    return total


def _nats_of_windows(model: Model, ids: Sequence[int], positions: int, progress: Progress) -> float:
    total, windows = 0.0, list(_windows(len(ids), positions))
    for at in range(0, len(windows), _WINDOWS):
        group = windows[at : at + _WINDOWS]
        scores = model.score([ids[start:end] for start, end, _ in group])
        total -= sum(sum(score.token_logprobs[-new:]) for score, (_, _, new) in zip(scores, group, strict=True))
        progress(at + len(group), len(windows))
    return total


def _windows(length: int, positions: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, how many of its last tokens no window before it had)."""
    done = min(length, positions + 1)
    yield 0, done, done - 1
    while done < length:
        end = min(done + max(1, positions // 2), length)
        yield max(0, end - positions - 1), end, end - done
        done = end


def _seq2seq(model: Model, data: Any, progress: Progress) -> tuple[Metrics, int]:
    reader, target = token_input(model.bundle, ENCODER, SOURCE), token_input(model.bundle, DECODER, TOKENS)
    assert reader is not None
    assert target is not None
    assert target.tokenizer is not None
    sources = _numbers(reader, data.sources)
    accepted = [[target.tokenizer.encode(text) for text in texts] for texts in data.targets]
    longest = (model.bundle.manifest.generation or {}).get("longest")
    room = 2 * max(len(tokens) for texts in accepted for tokens in texts) + 10
    room = room if longest is None else min(room, longest - 1)
    order = sorted(range(len(sources)), key=lambda place: -len(sources[place]))  # of similar length together
    decoded: dict[int, list[int]] = {}
    for at in range(0, len(order), _TEXTS):
        places = order[at : at + _TEXTS]
        found = model.generate([sources[place] for place in places], max_new_tokens=room)
        decoded |= {place: list(result.tokens) for place, result in zip(places, found, strict=True)}
        progress(len(decoded), len(order))
    answers = [decoded[place] for place in range(len(sources))]
    metrics = {"per": error_rate(answers, accepted), "wer": word_error_rate(answers, accepted), "bleu": bleu(answers, accepted)}
    return metrics, len(answers)


def _classification(model: Model, data: Any, progress: Progress) -> tuple[Metrics, int]:
    labels = model.bundle.manifest.labels or ()
    if unknown := [label for label in data.labels if label not in labels]:
        raise DataError(
            f"{data.name} has the class {unknown[0]!r}, which the network does not know; it knows: {', '.join(labels)}"
        )
    name, _ = model.bundle.graph()
    reader = token_input(model.bundle, name, TOKENS)
    assert reader is not None
    rows, found = _numbers(reader, data.texts), list[str]()
    for at in range(0, len(rows), _TEXTS):
        found += model.predict(rows[at : at + _TEXTS]).labels or ()
        progress(len(found), len(rows))
    errors = sum(label != data.labels[target] for label, target in zip(found, data.targets, strict=True))
    return {"accuracy": 100 * (1 - errors / len(rows)), "errors": errors}, len(rows)


def _numbers(reader: TokenInput, texts: Sequence[str]) -> list[list[int]]:
    """As in training: a symbol that the vocabulary lacks is <unk>."""
    assert reader.tokenizer is not None
    return [[*reader.before, *reader.tokenizer.encode(text), *reader.after] for text in texts]


_MEASURES: dict[str, Callable[[Model, Any, Progress], tuple[Metrics, int]]] = {
    "language-model": _language_model,
    "seq2seq": _seq2seq,
    "classification": _classification,
}
