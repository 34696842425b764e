"""The decoding loop. Requests join and leave a running batch; every row's text is what it would be alone.

scheduler = Scheduler(decoder)
ticket = scheduler.submit(request)
while scheduler.step(): ...                # one token for every request that is under way
ticket.results()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from ..errors import EdgekitError, GenerationError
from .beam import BeamSearch, take_plain_beams
from .decoder import Decoder
from .numeric import log_softmax
from .options import Generation
from .ranking import Ranking
from .rows import PIECE, Rows
from .search import Array, Hypothesis, Independent, Moves, Request, Search, likeliest, take_plain
from .speculate import Speculator

MOST_ROWS = 128
Encode = Callable[[Sequence[Sequence[int]]], Mapping[str, Array]]


class Ticket:
    """A submitted request. `results` are there when it is `done`."""

    def __init__(self, request: Request, start: Rows | None) -> None:
        self.request = request
        self.search: Search | None = None  # once it is under way
        self.speculator: Speculator | None = None
        self.error: BaseException | None = None
        self.done = False
        self.is_plain = False  # whether only the likeliest tokens matter
        self._start = start

    @property
    def most_rows(self) -> int:
        options = self.request.options
        return options.beams if options.beams > 1 else options.n_best

    @property
    def most_tokens(self) -> int:
        return len(self.request.prompt) + self.request.room  # which has the prefix in it

    def cancel(self) -> None:
        """Leave the batch at the next step, without results."""
        if not self.done:
            self.done, self.error = True, GenerationError("this generation was cancelled; submit it again")

    def results(self) -> list[Generation]:
        if self.error is not None:
            raise self.error
        if not self.done or self.search is None:
            raise GenerationError("this generation is still under way; call step() until the ticket is done")
        return self.search.results()


class Scheduler:
    """At most `most_rows` rows at a time, and caches of at most `memory_limit` bytes; further requests wait for their turn."""

    def __init__(
        self, decoder: Decoder, encode: Encode | None = None, *, most_rows: int = MOST_ROWS, memory_limit: int | None = None
    ) -> None:
        self.decoder = decoder
        self.allow(most_rows, memory_limit)
        self._encode = encode
        self._waiting: deque[Ticket] = deque()
        self._activate([])
        self._joining: list[Ticket] = []  # whose prompts are being read
        self._rows = Rows(decoder, room=1, capacity=1)
        self._ranking = Ranking(decoder.session.threads)
        self._logits: Array = np.empty((0, decoder.vocabulary), np.float32)
        self._raised: BaseException | None = None  # by a callback in this step

    def allow(self, most_rows: int, memory_limit: int | None) -> None:
        self.most_rows = 1 if self.decoder.one_row else most_rows
        self.memory_limit = memory_limit

    @property
    def held_bytes(self) -> int:
        return self._rows.held_bytes

    def submit(self, request: Request, start: Rows | None = None) -> Ticket:
        """Have a request decoded. `start` is a row that already holds the beginning of its prompt."""
        ticket = Ticket(request, start)
        self.decoder.capacity(ticket.most_tokens)
        needed = self.decoder.cache_bytes(ticket.most_rows, ticket.most_tokens)
        if ticket.most_rows > self.most_rows:
            raise GenerationError(f"{ticket.most_rows} rows are more than the {self.most_rows} of this decoder; lower beams")
        if self.memory_limit is not None and needed > self.memory_limit:
            raise GenerationError(
                f"{ticket.most_rows} rows of {ticket.most_tokens} tokens need {needed / 2**20:.0f} MB for their state, and "
                f"{self.memory_limit / 2**20:.0f} MB are allowed; lower beams or max_new_tokens, or raise memory_limit"
            )
        self._waiting.append(ticket)
        return ticket

    def step(self) -> bool:
        """Choose one token for every request under way (several by speculation); False when nothing is left to do.

        What a callback raises ends its own request, and is raised here once the others have gone on.
        """
        try:
            self._leave()
            self._admit()
            if not self._active:
                return False
            if self._greedy:
                self._go_on_greedily(self._greedy)
            else:
                starts = self._starts()
                self._go_on(self._choose(starts), starts)
        except BaseException as error:  # the graph failed, or the caller was interrupted: nobody's rows can be trusted
            self._give_up(error)
            raise
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        return bool(self._active or self._waiting)

    def _give_up(self, error: BaseException) -> None:
        for ticket in (*self._active, *self._joining):
            if not ticket.done:
                ticket.done, ticket.error = True, error
        self._activate([])
        self._joining, self._raised = [], None
        self._rows, self._logits = Rows(self.decoder, room=1, capacity=1), self._logits[:0]

    def _activate(self, tickets: list[Ticket]) -> None:
        """These are under way from now on; note whether all are decoded greedily and in nothing else than the plainest way."""
        self._active = tickets
        plain = all(isinstance(t.search, Independent) and t.is_plain and not t.speculator for t in tickets)
        self._greedy: list[Independent] = [t.search for t in tickets] if plain else []  # type: ignore[misc]

    def _starts(self) -> list[int]:
        """Where the rows of each active request begin, and where the last ones end."""
        widths = [ticket.search.width for ticket in self._active if ticket.search]
        return [0, *accumulate(widths)]

    # Joining

    def _admit(self) -> None:
        if not self._waiting:
            return
        room = self.most_rows - sum(ticket.most_rows for ticket in self._active)
        tokens = max((ticket.most_tokens for ticket in self._active), default=0)
        while self._waiting:
            ticket = self._waiting[0]
            if ticket.done:  # cancelled before it began
                self._waiting.popleft()
                continue
            longest = max(tokens, ticket.most_tokens)
            rows = self.most_rows - room + ticket.most_rows
            fits = self.memory_limit is None or self.decoder.cache_bytes(rows, longest) <= self.memory_limit
            if ticket.most_rows > room or not (fits or rows == ticket.most_rows):
                break
            self._joining.append(self._waiting.popleft())
            room, tokens = room - ticket.most_rows, longest
        if self._joining:
            self._rows.reserve(self.most_rows - room, self.decoder.capacity(tokens))
            for _, group in groupby(sorted(self._joining, key=_kind), key=_kind):
                self._read(list(group))
            self._joining = []

    def _read(self, tickets: list[Ticket]) -> None:
        """Feed the prompts of requests that are equally long, and add them to the batch."""
        sources = [ticket.request.source for ticket in tickets if ticket.request.source is not None]
        memory = self._encode(sources) if self._encode and sources else None
        request = tickets[0].request
        alone = not self._active and len(self._rows.lengths) >= len(tickets) and tickets[0]._start is None
        rows = self._rows if alone else Rows(self.decoder, room=len(tickets), capacity=self.decoder.capacity(request.length))
        already = 0
        if (start := tickets[0]._start) is not None:
            rows.join(start)
            already = int(start.lengths[0])
        else:
            rows.start(len(tickets), memory)
        tokens = np.array([[*t.request.prompt, *t.request.prefix][already:] for t in tickets], np.int64)
        wanted = range(len(request.prompt) - 1 - already, request.length - already)
        logits = rows.read(tokens, wanted)
        if not alone:
            self._rows.join(rows)
        for ticket, of_row in zip(tickets, logits, strict=True):
            forced = _forced(ticket.request, of_row)
            ticket.search = (BeamSearch if ticket.request.options.beams > 1 else Independent)(ticket.request, forced)
            # Where everything but one token may be banned, the general way knows what to say.
            ticket.is_plain = ticket.search.is_plain and self.decoder.vocabulary > len(ticket.request.ending) + 2
            if ticket.request.options.speculate and Speculator.works_with(self.decoder):
                ticket.speculator = Speculator(self.decoder, ticket.request, ticket.search)
        self._activate(self._active + tickets)
        last = logits[:, -1]
        self._logits = last if alone else np.concatenate((self._logits, last))

    # Going on

    def _choose(self, starts: Sequence[int]) -> list[Moves]:
        """The moves of every active request, in their order."""
        moves: dict[int, Moves] = {}
        if greedy := self._plain(Independent):
            searches: Any = [self._active[at].search for at in greedy]
            tokens = take_plain(searches, self._of(greedy, starts), self._ranking)
            moves |= {at: _move(token) for at, token in zip(greedy, tokens, strict=True)}
        if beams := self._plain(BeamSearch):
            searches = [self._active[at].search for at in beams]
            moves |= zip(beams, take_plain_beams(searches, self._of(beams, starts), self._ranking), strict=True)
        for at, ticket in enumerate(self._active):
            if at not in moves:
                moves[at] = self._take(ticket, self._logits[starts[at] : starts[at + 1]])
        return [moves[at] for at in range(len(self._active))]

    def _plain(self, kind: type[Search]) -> list[int]:
        """The places of active requests of one kind of search of which only the likeliest tokens matter."""
        return [at for at, ticket in enumerate(self._active) if ticket.is_plain and isinstance(ticket.search, kind)]

    def _of(self, places: Iterable[int], starts: Sequence[int]) -> Array:
        """The logits of the requests at these places, one after the other."""
        rows = [row for at in places for row in range(starts[at], starts[at + 1])]
        return self._logits if len(rows) == len(self._logits) else self._logits[rows]

    def _take(self, ticket: Ticket, logits: Array) -> Moves:
        assert ticket.search is not None
        try:
            return ticket.search.take(logits)
        except BaseException as error:  # of this request alone
            ticket.error = error
            if not isinstance(error, EdgekitError):  # a callback's own
                self._raised = self._raised or error
            return Moves([], [])

    def _go_on_greedily(self, searches: Sequence[Independent]) -> None:
        """The same for a batch in which every request has one row and wants the likeliest token: what nearly always happens."""
        tokens = take_plain(searches, self._logits, self._ranking)
        if None in tokens:
            self._go_on([_move(token) for token in tokens], range(len(tokens)))
        else:
            self._logits = self._rows.step(tokens)  # type: ignore[arg-type]

    def _go_on(self, moves: Sequence[Moves], starts: Sequence[int]) -> None:
        """Feed the chosen tokens; requests that have none are done."""
        parents: list[int] = []
        tokens: list[int] = []
        for ticket, move, start in zip(self._active, moves, starts, strict=False):
            parents += [start + parent for parent in move.parents]
            tokens += move.tokens
            ticket.done = not move.tokens
        self._activate([ticket for ticket in self._active if not ticket.done])
        self._rows.select(parents)
        if not tokens:
            self._logits = self._logits[:0]
        elif len(self._active) == 1 and (speculator := self._active[0].speculator):
            ticket = self._active[0]
            logits = speculator.advance(self._rows, tokens[0], lambda row: self._take(ticket, row))
            ticket.done = logits is None
            self._logits = self._logits[:0] if logits is None else logits
            if logits is None:
                self._activate([])
                self._rows.select([])
        else:
            self._logits = self._rows.step(tokens)

    def _leave(self) -> None:
        """Take cancelled requests out of the batch."""
        if any(ticket.done for ticket in self._active):
            starts = self._starts()
            kept = [row for at, t in enumerate(self._active) if not t.done for row in range(starts[at], starts[at + 1])]
            self._activate([ticket for ticket in self._active if not ticket.done])
            self._rows.select(kept)
            self._logits = self._logits[kept]


def _move(token: int | None) -> Moves:
    """Of a search of one row, which goes on with this token or not at all."""
    return Moves([], []) if token is None else Moves([0], [token])


def _kind(ticket: Ticket) -> tuple[int, int, int]:
    """Requests of one kind are read together."""
    request = ticket.request
    alone = id(ticket) if ticket._start is not None or request.length > PIECE else 0
    return request.length, len(request.prefix), alone


def _forced(request: Request, logits: Array) -> Hypothesis:
    """The prefix, scored: logits (prefix + 1, vocabulary) from the last token of the prompt on."""
    if not request.prefix:
        return Hypothesis()
    scores = log_softmax(logits[:-1].copy())
    logprobs = tuple(float(row[token]) for row, token in zip(scores, request.prefix, strict=True))
    count = request.options.alternatives
    return Hypothesis(request.prefix, logprobs, sum(logprobs), tuple(likeliest(scores, count)) if count else ())
