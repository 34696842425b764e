"""Generation that is inside the graph: `edgekit wrap` put decoder, loop and choice into the one graph "generator".

What can be asked of it is what it was wrapped for: greedy decoding or so many beams, `max_new_tokens`, and `n_best` up to the
beams. See exporters/targets/in_graph.py for its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..bundle import GENERATOR, Bundle
from ..errors import FeedError, GenerationError, OptionError
from ..session import Session
from ..state import SOURCE
from ..text import Tokenizer
from ..tokens import TokenInput, token_input
from .options import Generation, Options
from .scheduler import MOST_ROWS

PROMPT, ROOM = "prompt", "max_new_tokens"
DEFAULT_ROOM = 256  # as without the graph
_ASKED = (ROOM, "beams", "n_best")  # what may differ from the defaults


@dataclass(frozen=True)
class WrappedGenerator:
    """Shared by all threads: it holds nothing that changes."""

    session: Session
    prompts: TokenInput
    tokenizer: Tokenizer | None  # of what is generated
    beams: int
    room: int | None = None  # tokens that are generated where nobody says how many
    eos: int | None = None
    positions: int | None = None  # for the decoder's prompt and text; None: no limit

    def generate(self, prompts: Any, given: Mapping[str, Any]) -> Any:
        options = self._options(given)
        rows, one = self.prompts.read(prompts)
        if not self._has_source:
            rows = [self._without_padding(row, place) for place, row in enumerate(rows)]
        room = self._room(rows, options)
        found: list[list[Generation]] = [[]] * len(rows)
        for places, batch in self._batches(rows):
            outputs = self.session.run({self.prompts.spec.name: batch, ROOM: np.array(room, np.int64)})
            for row, place in enumerate(places):
                found[place] = self._generations(outputs, row)[: options.n_best]
                if not found[place]:
                    raise GenerationError(f"text {place} got no token that is possible; look at the network's logits for it")
        shaped = [texts if options.n_best > 1 else texts[0] for texts in found]
        return shaped[0] if one else shaped

    def stream(self, prompt: Any, given: Mapping[str, Any]) -> Iterator[str]:
        """The whole text in one piece: nothing leaves the graph before it is done."""
        if self._options(given).n_best > 1:
            raise OptionError("a stream is one text and n_best is more; use generate for several")
        found = self.generate(prompt, given)
        if isinstance(found, list):
            raise OptionError(f"a list of {len(found)} prompts was given and one is expected; use generate for several")
        return iter([found.text])

    @property
    def _has_source(self) -> bool:
        return self.prompts.spec.name == SOURCE

    def _options(self, given: Mapping[str, Any]) -> Options:
        options = Options.of(**{"beams": self.beams, **given})
        if options.beams != self.beams:
            raise OptionError(
                f"beams is {options.beams}, and this graph was made for {self.beams}; leave it out, or wrap the bundle it came "
                f"from with --beams {options.beams}"
            )
        plain = Options(beams=self.beams)
        for name in (item.name for item in fields(Options) if item.name not in _ASKED):
            if getattr(options, name) != getattr(plain, name):
                raise OptionError(
                    f"{name} is not inside this graph, which only knows {' and '.join(_ASKED[::2])}; leave it out, or use the "
                    "bundle it was wrapped from"
                )
        return options

    def _without_padding(self, row: Sequence[int], place: int) -> list[int]:
        tokens = [token for token in row if token != self.prompts.pad]
        if not tokens:
            raise FeedError(f"text {place} is empty; expected at least one token")
        return tokens

    def _room(self, rows: Sequence[Sequence[int]], options: Options) -> int:
        """What does not fit is refused; where nobody said how much, the graph itself generates what does."""
        longest = 1 if self._has_source else max(map(len, rows))
        if self.positions is not None and longest >= self.positions:
            raise GenerationError(f"the prompt has {longest} tokens and the network {self.positions} positions; shorten it")
        if options.max_new_tokens is None:
            return self.room or DEFAULT_ROOM
        if self.positions is not None and longest + options.max_new_tokens > self.positions:
            raise GenerationError(
                f"{longest + options.max_new_tokens} tokens do not fit: the network has {self.positions} positions; shorten "
                "the prompt or lower max_new_tokens"
            )
        return int(options.max_new_tokens)

    def _batches(self, rows: Sequence[list[int]]) -> Iterator[tuple[list[int], Any]]:
        """(places of the rows, padded tokens), at most as many as the loop outside a graph takes, and in its order: prompts by
        their length, sources as they come. Only equally long ones are together where there is no padding."""
        order = list(range(len(rows)))
        if not self._has_source or self.prompts.pad is None:
            order.sort(key=lambda place: len(rows[place]))
        fixed = self.prompts.spec.shape[1]
        most = max(1, MOST_ROWS // self.beams)
        while order:
            longest = len(rows[order[0]]) if self.prompts.pad is None else max(map(len, rows))
            places = [place for place in order[:most] if len(rows[place]) <= longest]
            order = order[len(places) :]
            time = fixed if isinstance(fixed, int) else max(len(rows[place]) for place in places)
            yield places, self.prompts.padded([rows[place] for place in places], time)

    def _generations(self, outputs: Mapping[str, Any], row: int) -> list[Generation]:
        """Of one prompt, the best first."""
        of_row = {name: array[row] if self.beams > 1 else array[row : row + 1] for name, array in outputs.items()}
        return [
            self._generation(tokens[:length].tolist(), float(score), logprobs[:length].tolist())
            for tokens, length, score, logprobs in zip(
                *map(of_row.get, ("tokens", "lengths", "score", "logprobs")), strict=True
            )
            if length
        ]

    def _generation(self, tokens: list[int], score: float, logprobs: list[float]) -> Generation:
        ended = tokens[-1] == self.eos
        kept = tokens[:-1] if ended else tokens
        text = "" if self.tokenizer is None else self.tokenizer.decode(kept)
        return Generation(text, tuple(kept), score, tuple(logprobs[: len(kept)]), "eos" if ended else "length")


def wrapped_generator(bundle: Bundle, session: Session) -> WrappedGenerator:
    manifest = bundle.manifest
    about: Mapping[str, Any] = manifest.generation or {}
    prompts = token_input(bundle, GENERATOR, session.signature.inputs[0].name)
    if prompts is None or ROOM not in {spec.name for spec in session.signature.inputs}:
        raise OptionError(f"the graph of {manifest.name} does not take {PROMPT} or {SOURCE} and {ROOM}; use run")
    file = manifest.tokenizers.get("target") or manifest.tokenizers.get("text")
    return WrappedGenerator(
        session,
        prompts,
        None if file is None else Tokenizer.open(bundle.root / file),
        beams=int(about.get("beams", 1)),
        room=about.get(ROOM),
        eos=about.get("eos"),
        positions=about.get("positions"),
    )


def inside_one_graph(name: str) -> OptionError:
    """For what needs the decoder's steps one by one."""
    return OptionError(
        f"{name} generates inside one graph, which gives whole texts only; use generate, or the bundle it was wrapped from"
    )
