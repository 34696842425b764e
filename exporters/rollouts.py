"""What the graphs of a network on text are calibrated on: texts, and what the network itself writes after them.

The steps of a decoder depend on the states before them, so these are not made up: the original bundle reads prompts, or
encodes sources, draws each next token from its own probabilities, and every feed that its decoder is given on the way is a
sample. A text that has ended takes no further part. Without texts, prompts are random tokens; what follows them is the
network's own all the same. The same seed gives the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.answers import SEGMENTS
from runtime.bundle import DECODER, ENCODER, MANY, Bundle
from runtime.errors import DataError
from runtime.session import Session
from runtime.state import LOGITS, SOURCE, TOKENS, reorder, step
from runtime.tokens import TokenInput, token_input

from .calibration import Feeds
from .laws import Host, Text
from .quantizers.scheme import Calibration

ROWS = 512  # texts of a network that only reads
PROMPTS = 64  # that are continued
_STEPS = 16  # tokens that are written after a prompt
_WRITTEN = 32  # at most, of an encoder–decoder's target
_AT_ONCE = 8  # prompts
_LENGTHS = (8, 48, 24, 32)  # of prompts, in turn
_TOKENS_AT_ONCE = 512  # of texts that are only read: at a width of 768 their activations take 130 MB in 12 layers
_RANDOM_LENGTH = 32

Array = NDArray[Any]
Tokens = list[int]


def calibration_of_text(bundle: Bundle, texts: Sequence[Tokens] | None = None, *, seed: int = 0) -> Calibration:
    """`texts` are token numbers: of sources, for encoder–decoders; without them, random ones."""
    graphs = bundle.manifest.graphs
    if texts is not None and not texts:
        raise DataError("there is no text to calibrate on; pass --data with at least one")

    def calibration(graph: str) -> Iterator[Feeds]:
        if graph in (DECODER, MANY) and DECODER in graphs:
            return _written(bundle, texts, seed)
        reader = _reader(bundle, graph)
        if reader is None:  # whatever else there is, such as an alignment
            return (inputs for entry, inputs, _ in bundle.goldens() if entry.graph == graph)
        count = PROMPTS if DECODER in graphs else ROWS
        return _read(bundle, graph, reader, texts[:count] if texts is not None else _random_texts(reader, count, seed))

    return calibration


def _reader(bundle: Bundle, graph: str) -> TokenInput | None:
    signature = bundle.manifest.graphs[graph].signature
    name = SOURCE if graph == ENCODER else TOKENS
    if {spec.name for spec in signature.inputs} - {name, SEGMENTS}:
        return None
    return token_input(bundle, graph, name)


def _read(bundle: Bundle, graph: str, reader: TokenInput, rows: Sequence[Tokens]) -> Iterator[Feeds]:
    """Padded batches; in every other one the second half of each text is of the second segment."""
    specs = {spec.name: spec for spec in bundle.manifest.graphs[graph].signature.inputs}
    cut = [row[: _longest(reader)] for row in rows]
    for number, (_, tokens) in enumerate(reader.batches(cut, limit=_TOKENS_AT_ONCE)):
        feeds = {reader.spec.name: tokens}
        if SEGMENTS in specs:
            segments = np.zeros(tokens.shape, specs[SEGMENTS].dtype)
            segments[:, tokens.shape[1] // 2 :] = number % 2
            feeds[SEGMENTS] = segments
        yield feeds


def _longest(reader: TokenInput) -> int | None:
    fixed = reader.spec.shape[1]
    return min([size for size in (reader.longest, fixed) if isinstance(size, int)], default=None)


def _random_texts(reader: TokenInput, count: int, seed: int) -> list[Tokens]:
    """Of different lengths, unless the graph takes one only."""
    random = np.random.default_rng(seed)
    words = _words(reader.vocabulary, reader.pad)
    fixed = reader.spec.shape[1]
    if isinstance(fixed, int):
        lengths = np.full(count, fixed)
    else:
        lengths = random.integers(1, min(_RANDOM_LENGTH, reader.longest or _RANDOM_LENGTH) + 1, count)
    return [random.choice(words, length).tolist() for length in lengths]


def _words(vocabulary: int | None, pad: int | None) -> Array:
    words = np.arange(vocabulary or 2)
    return words[words != pad] if pad is not None and len(words) > 1 else words


class _Recording(Session):
    """A session that keeps what it is given until it is asked for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._given: list[Feeds] = []

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self._given.append(dict(feeds))
        return super().run(feeds)

    def taken(self) -> list[Feeds]:
        given, self._given = self._given, []
        return given


def _written(bundle: Bundle, texts: Sequence[Tokens] | None, seed: int) -> Iterator[Feeds]:
    """Every feed of the decoder while it reads prompts and writes on."""
    graphs = bundle.manifest.graphs
    about = bundle.manifest.generation or {}
    recording = _Recording(bundle.graph_path(DECODER), graphs[DECODER].signature, device="cpu")
    sessions: dict[str, Session] = {DECODER: recording}
    if ENCODER in graphs:
        sessions[ENCODER] = Session(bundle.graph_path(ENCODER), graphs[ENCODER].signature, device="cpu")
    host = Host(sessions, -1 if about.get("pad") is None else about["pad"])
    random = np.random.default_rng(seed)
    batches = _sources(bundle, host, texts, seed) if ENCODER in graphs else _prompts(bundle, host, texts, seed)
    for prompt, source in batches:
        room = min(about.get("longest") or prompt.shape[1] + _WRITTEN, host.sizes.capacity(prompt.shape[1] + _WRITTEN))
        steps = min(_STEPS if source is None else _WRITTEN, room - prompt.shape[1])
        yield from _rollout(host, recording, Text(prompt, source, np.empty(0), 0.0), steps, about.get("eos"), random)


def _rollout(
    host: Host, recording: _Recording, text: Text, steps: int, end: int | None, random: np.random.Generator
) -> Iterator[Feeds]:
    tokens = text.tokens
    memory, state = host.start(text, tokens.shape[1] + max(0, steps))
    logits, state = step(recording, tokens, state, memory)
    yield from recording.taken()
    for _ in range(steps if host.sizes.tokens_at_once == 1 else 0):
        chances = logits[:, -1].astype(np.float64) + random.gumbel(size=logits[:, -1].shape)  # the largest is a draw
        if host.pad >= 0:
            chances[:, host.pad] = -np.inf
        if end is not None and host.sizes.rows is not None:  # a fixed number of rows: none can be left out
            chances[:, end] = -np.inf
        following = chances.argmax(axis=-1)
        going = np.flatnonzero(following != end)
        if not len(going):
            return
        if len(going) < len(following):
            state = reorder(host.signature, state, going)
            memory = {name: array[going] for name, array in memory.items() if name not in state}  # memories are batch first
        logits, state = step(recording, following[going][:, None], state, memory)
        yield from recording.taken()


def _prompts(bundle: Bundle, host: Host, texts: Sequence[Tokens] | None, seed: int) -> Iterator[tuple[Array, Array | None]]:
    """Batches (rows, time) of the beginnings of texts; those of one batch have one length, so that nothing is padded."""
    random = np.random.default_rng(seed)
    reader = token_input(bundle, DECODER, TOKENS)
    vocabulary = next(spec.shape[-1] for spec in host.signature.outputs if spec.name == LOGITS)
    words = _words(vocabulary if isinstance(vocabulary, int) else None, host.pad)
    longest = min(reader.longest if reader is not None and reader.longest else _LENGTHS[1], host.sizes.capacity(_LENGTHS[1]))
    size = host.sizes.rows or _AT_ONCE
    for number, start in enumerate(range(0, PROMPTS, size)):
        wanted = max(1, min(_LENGTHS[number % len(_LENGTHS)], longest - 1 if longest > 1 else 1))
        if texts is None:
            length = wanted
            rows = [random.choice(words, length).tolist() for _ in range(size)]
        else:
            chosen = [texts[place % len(texts)] for place in range(start, start + size)]
            if start >= len(texts) and number:
                return
            length = max(1, min(wanted, *(len(text) for text in chosen)))
            rows = [text[:length] for text in chosen]
        unit = host.sizes.tokens_at_once
        length = max(unit, length // unit * unit)
        filled = [(row * (length // len(row) + 1))[:length] for row in rows]  # shorter than what the graph takes at once
        yield np.array(filled, np.int64), None


def _sources(bundle: Bundle, host: Host, texts: Sequence[Tokens] | None, seed: int) -> Iterator[tuple[Array, Array | None]]:
    """Batches of the first token of a target, with its source."""
    reader = token_input(bundle, ENCODER, SOURCE)
    assert reader is not None
    about = bundle.manifest.generation or {}
    rows = [row[: _longest(reader)] for row in (texts if texts is not None else _random_texts(reader, PROMPTS, seed))][:PROMPTS]
    first = about.get("bos")
    size = host.sizes.rows or _AT_ONCE
    widest = max(map(len, rows))
    for _, source in reader.batches(rows, limit=widest * size):
        for start in range(0, len(source), size):
            part = source[start : start + size]
            if host.sizes.rows is not None and len(part) < host.sizes.rows:
                part = np.resize(part, (host.sizes.rows, part.shape[1]))
            yield np.full((len(part), host.sizes.tokens_at_once), 1 if first is None else first, np.int64), part
