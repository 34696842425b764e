"""From prompts to generated texts: what `Model.generate`, `Model.stream`, `Model.read` and `Model.scheduler` do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import OptionError
from ..machine import available_memory
from .beam import common_beginning
from .options import Generation, Options
from .requests import Prompt, Requests
from .rows import Rows
from .scheduler import MOST_ROWS, Scheduler, Ticket
from .search import Request
from .streaming import TextStream

_HELD_BYTES = 64 << 20  # of caches that are kept between calls
_WORTH_SHARING = 16  # tokens that all prompts begin with


class TextGenerator:
    """Shared by all threads: every call has a scheduler of its own."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.decoder = requests.decoder
        self._idle: list[Scheduler] = []  # with caches and bindings that the next call need not make again

    def generate(self, prompts: Any, given: Mapping[str, Any]) -> Any:
        rows, one = self._read(prompts)
        requests = [
            self.requests.request(row, options) for row, options in zip(rows, _each(given, len(rows), one), strict=True)
        ]
        results = self.run(requests)
        shaped = [found if request.options.n_best > 1 else found[0] for request, found in zip(requests, results, strict=True)]
        return shaped[0] if one else shaped

    def stream(self, prompt: Prompt, given: Mapping[str, Any]) -> Iterator[str]:
        options = Options.of(**given)
        return self.stream_request(self.requests.request(self._read_one(prompt), options), None)

    def read(self, text: Prompt) -> Context:
        if self.requests.encoder is not None:
            raise OptionError("read is for language models; an encoder–decoder reads its source as a whole: use generate")
        return Context(self, self.requests.target_tokens(text, "the text"))

    def request(self, prompt: Prompt, options: Options) -> Request:
        return self.requests.request(self._read_one(prompt), options)

    def _read(self, prompts: Any) -> tuple[list[list[int]], bool]:
        """Prompts in token numbers, and whether there was only one."""
        rows, one = self.requests.prompts.read(prompts)
        if self.requests.encoder is None:
            rows = [self.requests.target_tokens(row, f"text {place}") for place, row in enumerate(rows)]
        return rows, one

    def _read_one(self, prompt: Any) -> list[int]:
        rows, one = self._read(prompt)
        if not one:
            raise OptionError(f"a list of {len(rows)} prompts was given and one is expected; use generate for several")
        return rows[0]

    def stream_request(self, request: Request, start: Rows | None) -> Iterator[str]:
        if request.options.n_best > 1:
            raise OptionError(f"a stream is one text and n_best is {request.options.n_best}; use generate for several")
        return self._stream(request, start)

    def _stream(self, request: Request, start: Rows | None) -> Iterator[str]:
        scheduler = self.scheduler()
        ticket = scheduler.submit(request, start)
        text = TextStream(request)
        going_on = True
        while going_on:
            going_on = scheduler.step()
            if ticket.search is not None and not ticket.done and (piece := text.add(ticket.search.stable())):
                yield piece
        if piece := text.end(ticket.results()[0].text):
            yield piece

    def run(self, requests: Sequence[Request], start: Rows | None = None) -> list[list[Generation]]:
        most_rows = max([MOST_ROWS, *(request.options.beams for request in requests)])
        try:
            scheduler = self._idle.pop()  # looking first whether there is one would leave it to another thread
        except IndexError:
            scheduler = self.scheduler()
        scheduler.allow(most_rows, available_memory())
        shared = start or self._shared(requests)
        tickets = [scheduler.submit(request, shared) for request in requests]
        while scheduler.step():
            pass
        if scheduler.held_bytes <= _HELD_BYTES:
            self._idle.append(scheduler)
        return [ticket.results() for ticket in tickets]

    def _shared(self, requests: Sequence[Request]) -> Rows | None:
        """A row that holds what all prompts begin with, if that is worth computing once."""
        if len(requests) < 2 or self.requests.encoder is not None:
            return None
        beginning = common_beginning([request.prompt for request in requests])[: min(len(r.prompt) for r in requests) - 1]
        same_length = len({request.length for request in requests}) == 1
        if len(beginning) < _WORTH_SHARING or (same_length and len(beginning) < max(r.length for r in requests) // 2):
            return None
        return self.row_of(beginning)

    def row_of(self, tokens: Sequence[int]) -> Rows:
        rows = Rows(self.decoder, room=1, capacity=self.decoder.capacity(len(tokens)))
        rows.start(1)
        rows.read(np.array([tokens], np.int64))
        return rows

    def scheduler(self, *, most_rows: int = MOST_ROWS, memory_limit: int | None = None) -> Scheduler:
        limit = available_memory() if memory_limit is None else memory_limit
        encode = self.requests.encode if self.requests.encoder else None
        return Scheduler(self.decoder, encode, most_rows=most_rows, memory_limit=limit)


class Context:
    """A beginning that is computed once and continued as often as one likes. Made by `Model.read`.

    Its row holds all tokens but the last, which every continuation feeds again: what follows from it is not kept.
    """

    def __init__(self, generator: TextGenerator, tokens: Sequence[int]) -> None:
        self._generator = generator
        self.tokens: tuple[int, ...] = ()
        self._rows: Rows | None = None
        self._add(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, text: Prompt) -> None:
        """Go on with a text."""
        if not _is_nothing(text):
            self._add(self._generator.requests.target_tokens(text, "the text"))

    def rewind(self, length: int) -> None:
        """Return to the first `length` tokens."""
        if not isinstance(length, int | np.integer) or not 1 <= length <= len(self.tokens):
            raise OptionError(f"cannot rewind to {length} tokens; expected 1 to {len(self.tokens)}")
        kept = self.tokens[:length]
        if self._rows is not None and length > 1 and self._generator.decoder.can_rewind:
            self._rows.truncate(length - 1)
            self.tokens = kept
        elif length < len(self.tokens):  # a hidden state does not say what it was
            self.tokens, self._rows = (), None
            self._add(kept)

    def generate(self, prompt: Prompt = "", **options: Any) -> Any:
        """As `Model.generate`, of one prompt that follows what was read."""
        request = self._request(prompt, options)
        found = self._generator.run([request], self._rows)[0]
        return found if request.options.n_best > 1 else found[0]

    def stream(self, prompt: Prompt = "", **options: Any) -> Iterator[str]:
        return self._generator.stream_request(self._request(prompt, options), self._rows)

    def _request(self, prompt: Prompt, options: Mapping[str, Any]) -> Request:
        following = [] if _is_nothing(prompt) else self._generator.requests.target_tokens(prompt, "the prompt")
        return self._generator.requests.request([*self.tokens, *following], Options.of(**options))

    def _add(self, tokens: Sequence[int]) -> None:
        everything = (*self.tokens, *tokens)
        fed = everything[max(0, len(self.tokens) - 1) : -1]
        decoder = self._generator.decoder
        capacity = decoder.capacity(len(everything))
        if fed:
            if self._rows is None:
                self._rows = self._generator.row_of(fed)
            else:
                self._rows.reserve(1, capacity)
                self._rows.read(np.array([fed], np.int64))
        self.tokens = everything


class Batch:
    """A running batch: requests join it at any time, and leave it when they are done. Made by `Model.scheduler`.

    tickets = [batch.submit("def "), batch.submit("class ", beams=4)]
    while batch.step(): ...
    tickets[0].results()[0].text
    """

    def __init__(self, generator: TextGenerator, *, most_rows: int, memory_limit: int | None) -> None:
        for name, value in (("most_rows", most_rows), ("memory_limit", 1 if memory_limit is None else memory_limit)):
            if not isinstance(value, int | np.integer) or value < 1:
                raise OptionError(f"{name} is {value!r}, expected a whole number of 1 or more")
        self._generator = generator
        self._scheduler = generator.scheduler(most_rows=most_rows, memory_limit=memory_limit)

    def submit(self, prompt: Prompt, **options: Any) -> Ticket:
        return self._scheduler.submit(self._generator.request(prompt, Options.of(**options)))

    def step(self) -> bool:
        """One more token for every request under way; False when all are done."""
        return self._scheduler.step()

    def run(self) -> None:
        """Until all requests are done."""
        while self.step():
            pass


def _is_nothing(text: Any) -> bool:
    """Whether it is an empty text, which adds nothing; anything that is no text is refused where it is read."""
    return isinstance(text, Collection) and not len(text)


def _each(given: Mapping[str, Any], count: int, one: bool) -> list[Options]:
    """Options of every prompt; `seed` may be a list with one number for each."""
    seed = given.get("seed")
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        if one or len(seed) != count:
            raise OptionError(f"there are {len(seed)} seeds for {count} prompts; give one number, or one for each of a list")
        options = Options.of(**{**given, "seed": seed[0]})
        return [replace(options, seed=number) for number in seed]
    return [Options.of(**given)] * count
