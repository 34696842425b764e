"""How the next token is chosen, as nodes of the loop's body: what runtime/generation does in Python, by the same rules.

Both kinds carry values from turn to turn, next to the decoder's own state. `first` gives their values before the first turn,
`take` those after it from the logits of this one. See runtime/generation/search.py and beam.py for what the rules are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from runtime.generation.options import Options

from .graph_parts import Nodes

_INFINITY = np.inf
_DOUBLE = TensorProto.DOUBLE  # totals are added up in float64, as the host does


@dataclass(frozen=True)
class Marks:
    """Tokens with a meaning. `fill` is what stands behind the end of a text, and what rows that have ended are fed."""

    vocabulary: int
    pad: int | None
    eos: int | None

    @property
    def fill(self) -> int:
        return next((token for token in (self.pad, self.eos) if token is not None), 0)


class Carried(NamedTuple):
    """A value that goes from turn to turn. Sizes of None may change."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class Turn(NamedTuple):
    """What a turn gives: carried values in their order, what is collected, whether all rows have ended, and the rows that
    the decoder's state goes on from (None: every row from itself)."""

    carried: list[str]
    collected: list[str]
    all_ended: str
    parents: str | None


class Greedy:
    """The likeliest token that is not padding."""

    beams = 1
    carried = (
        Carried("fed", "int64", (None, None)),
        Carried("ended", "bool", (None,)),
        Carried("total", "float64", (None,)),
        Carried("length", "int64", (None,)),
    )
    collected = (("tokens", "int64"), ("logprobs", "float32"))

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def first(self, nodes: Nodes, prompt: str, batch: str) -> list[str]:
        return [
            prompt,
            nodes.filled(batch, False, np.bool_),
            nodes.filled(batch, 0, np.float64),
            nodes.filled(batch, 0, np.int64),
        ]

    def take(self, nodes: Nodes, logits: str, values: dict[str, str], turn: str, room: str) -> Turn:
        marks, ended = self.marks, values["ended"]
        token = self._likeliest(nodes, logits)
        logprob = nodes.flat(nodes("GatherElements", nodes("LogSoftmax", logits, axis=-1), nodes.column(token), axis=1))
        logprob = nodes("Where", ended, 0.0, logprob)
        total = nodes("Add", values["total"], nodes("Cast", logprob, to=_DOUBLE))
        length = nodes("Add", values["length"], nodes("Cast", nodes("Not", ended), to=TensorProto.INT64))
        ends = nodes("GreaterOrEqual", length, room)
        if marks.eos is not None:
            ends = nodes("Or", ends, nodes("Equal", token, marks.eos))
        after = nodes("Or", ended, ends)
        fed = nodes.column(nodes("Where", after, marks.fill, token))
        shown = nodes("Where", ended, marks.fill, token)
        return Turn([fed, after, total, length], [shown, logprob], _all(nodes, after), None)

    def _likeliest(self, nodes: Nodes, logits: str) -> str:
        if self.marks.pad is None:
            return nodes("ArgMax", logits, axis=-1, keepdims=0)
        _, best = nodes.several("TopK", 2, logits, [2], axis=-1)
        first, second = (nodes.flat(nodes.part(best, rank, rank + 1)) for rank in (0, 1))
        return nodes("Where", nodes("Equal", first, self.marks.pad), second, first)

    def results(self, nodes: Nodes, carried: dict[str, str], collected: dict[str, str], batch: str) -> dict[str, str]:
        whole = {name: nodes("Transpose", value, perm=[1, 0]) for name, value in collected.items()}
        score = nodes("Div", carried["total"], _power(nodes, carried["length"]))
        return whole | {"lengths": carried["length"], "score": nodes("Cast", score, to=TensorProto.FLOAT)}


class Beams:
    """Beam search. A beam that is not there has a total of -inf: nothing that continues it is ever taken.

    Rows are (batch · width): of a language model's prompt one each, then `beams`. `texts` and `text_logprobs` are what the
    beams have generated so far, `finished_…` the best texts that ended, of which one that is not there has the score -inf.
    """

    collected: tuple[tuple[str, str], ...] = ()

    def __init__(self, marks: Marks, beams: int) -> None:
        self.marks, self.beams = marks, beams
        self.carried = (
            Carried("fed", "int64", (None, None)),
            Carried("ended", "bool", (None,)),
            Carried("totals", "float64", (None, None)),
            Carried("texts", "int64", (None, None)),
            Carried("text_logprobs", "float32", (None, None)),
            Carried("scores", "float64", (None, beams)),
            Carried("finished", "int64", (None, None)),
            Carried("finished_logprobs", "float32", (None, None)),
            Carried("finished_lengths", "int64", (None,)),
        )
        banned = 0 if marks.pad is None else 1
        self._candidates = 2 * beams  # enough that `beams` go on though every ending token comes first
        self._ranks = min(self._candidates + banned, marks.vocabulary)  # of each row

    def first(self, nodes: Nodes, prompt: str, batch: str, *, repeated: bool) -> list[str]:
        """`repeated`: whether the prompt has a row for every beam already, of which only the first counts."""
        beams = self.beams
        totals = np.full((1, beams if repeated else 1), -_INFINITY)
        totals[0, 0] = 0.0
        rows, all_beams = nodes.size(prompt, 0), nodes("Mul", batch, [beams])
        empty, finished = (nodes("Concat", count, [0], axis=0) for count in (rows, all_beams))
        return [
            prompt,
            nodes.filled(batch, False, np.bool_),
            nodes("Expand", nodes.constant(totals, np.float64), nodes("Concat", batch, [1], axis=0)),
            nodes.filled(empty, 0, np.int64),
            nodes.filled(empty, 0, np.float32),
            nodes.filled(nodes("Concat", batch, [beams], axis=0), -_INFINITY, np.float64),
            nodes.filled(finished, 0, np.int64),
            nodes.filled(finished, 0, np.float32),
            nodes.filled(all_beams, 0, np.int64),
        ]

    def take(self, nodes: Nodes, logits: str, values: dict[str, str], turn: str, room: str) -> Turn:
        beams, never = self.beams, nodes.constant(-_INFINITY, np.float64)
        batch = nodes("Shape", values["ended"])
        numbers = nodes.column(nodes.range(batch))  # (batch, 1)
        length = nodes("Add", turn, 1)
        keys, rows, tokens, logprobs = self._best(nodes, logits, values, batch, numbers)
        possible = nodes("Greater", keys, never)
        ends = nodes.column(nodes("GreaterOrEqual", length, room))  # (batch, 1)
        if self.marks.eos is not None:
            ends = nodes("Or", ends, nodes("Equal", tokens, self.marks.eos))
        ending, going = nodes("And", possible, ends), nodes("And", possible, nodes("Not", ends))
        kept = self._keep(nodes, values, batch, numbers, length, (ending, keys, rows, tokens, logprobs))
        # the first that go on; the keys are in order, and of equals the earlier comes first
        totals, place = nodes.several("TopK", 2, nodes("Where", going, keys, never), [beams], axis=1)
        parents, token, logprob = (nodes("GatherElements", item, place, axis=1) for item in (rows, tokens, logprobs))
        parents = nodes.flat(parents)
        best, worst = nodes.flat(nodes.part(totals, 0, 1)), nodes.flat(nodes.part(kept[0], beams - 1, beams))
        settled = nodes("LessOrEqual", nodes("Div", best, _power(nodes, length)), worst)
        settled = nodes("And", settled, nodes("Greater", worst, never))
        none_left = nodes("Not", nodes("Greater", best, never))
        after = nodes("Or", values["ended"], nodes("Or", settled, none_left))
        idle = nodes("Or", nodes.column(after), nodes("Not", nodes("Greater", totals, never)))
        fed = nodes.column(nodes.flat(nodes("Where", idle, self.marks.fill, token)))
        texts = _longer(nodes, values["texts"], parents, token)
        text_logprobs = _longer(nodes, values["text_logprobs"], parents, logprob)
        return Turn([fed, after, totals, texts, text_logprobs, *kept], [], _all(nodes, after), parents)

    def _best(self, nodes: Nodes, logits: str, values: dict[str, str], batch: str, numbers: str) -> tuple[str, str, str, str]:
        """The best continuations of each search, in order, (batch, candidates): key, row, token and log-probability."""
        never = nodes.constant(-_INFINITY, np.float64)
        _, tokens = nodes.several("TopK", 2, logits, [self._ranks], axis=-1)
        logprobs = nodes("GatherElements", nodes("LogSoftmax", logits, axis=-1), tokens, axis=1)
        keys = nodes("Add", nodes("Cast", logprobs, to=_DOUBLE), nodes("Reshape", values["totals"], [-1, 1]))
        if self.marks.pad is not None:
            keys = nodes("Where", nodes("Equal", tokens, self.marks.pad), never, keys)
        by_search = nodes("Concat", batch, [-1], axis=0)
        keys, tokens, logprobs = (nodes("Reshape", item, by_search) for item in (keys, tokens, logprobs))
        if self._ranks < self._candidates:  # of so small a vocabulary the prompt's only row has too few
            more = nodes("Concat", batch, [self._candidates], axis=0)
            fillers = ((keys, -_INFINITY, np.float64), (tokens, 0, np.int64), (logprobs, 0, np.float32))
            keys, tokens, logprobs = (
                nodes("Concat", item, nodes.filled(more, value, dtype), axis=1) for item, value, dtype in fillers
            )
        keys, index = nodes.several("TopK", 2, keys, [self._candidates], axis=1)
        keys = nodes("Where", nodes.column(values["ended"]), never, keys)
        width = nodes.size(values["totals"], 1)
        beam = nodes("Min", nodes("Div", index, self._ranks), nodes("Sub", width, 1))  # a filler's is beyond all
        rows = nodes("Add", nodes("Mul", numbers, width), beam)
        tokens, logprobs = (nodes("GatherElements", item, index, axis=1) for item in (tokens, logprobs))
        return keys, rows, tokens, logprobs

    def _keep(
        self, nodes: Nodes, values: dict[str, str], batch: str, numbers: str, length: str, candidates: tuple[str, ...]
    ) -> list[str]:
        """scores, finished, finished_logprobs and finished_lengths with those of the first `beams` candidates that end."""
        beams = self.beams
        ending, keys, rows, tokens, logprobs = (nodes.part(item, 0, beams) for item in candidates)
        score = nodes("Where", ending, nodes("Div", keys, _power(nodes, length)), nodes.constant(-_INFINITY, np.float64))
        scores, place = nodes.several("TopK", 2, nodes("Concat", values["scores"], score, axis=1), [beams], axis=1)
        # Below, what was finished stands before what is new: (2 · batch · beams) rows, of which these go on.
        count = nodes("Mul", batch, beams)
        is_new = nodes("Cast", nodes("GreaterOrEqual", place, beams), to=TensorProto.INT64)
        place = nodes("Add", place, nodes("Mul", numbers, beams))
        chosen = nodes.flat(nodes("Add", place, nodes("Mul", is_new, nodes("Sub", count, beams))))
        result = [scores]
        parents = nodes.flat(rows)
        for name, following, own, fill in (
            ("finished", tokens, "texts", nodes.constant([[self.marks.fill]])),
            ("finished_logprobs", logprobs, "text_logprobs", nodes.constant([[0]], np.float32)),
        ):
            column = nodes("Expand", fill, nodes("Concat", count, [1], axis=0))
            before = nodes("Concat", values[name], column, axis=1)
            both = nodes("Concat", before, _longer(nodes, values[own], parents, following), axis=0)
            result.append(nodes("Gather", both, chosen, axis=0))
        lengths = nodes("Concat", values["finished_lengths"], nodes("Expand", length, count), axis=0)
        return [*result, nodes("Gather", lengths, chosen, axis=0)]

    def results(self, nodes: Nodes, carried: dict[str, str], collected: dict[str, str], batch: str) -> dict[str, str]:
        there = nodes("Greater", carried["scores"], nodes.constant(-_INFINITY, np.float64))
        shape = nodes("Concat", batch, [self.beams], axis=0)
        lengths = nodes("Where", there, nodes("Reshape", carried["finished_lengths"], shape), 0)
        longest = nodes("Reshape", nodes("ReduceMax", lengths, keepdims=0), [1])
        found = {"lengths": lengths, "score": nodes("Cast", carried["scores"], to=TensorProto.FLOAT)}
        # A text that is not there has the tokens of some beam in its place, and a longer one may have been given up.
        inside = nodes("Less", nodes.range(longest), nodes("Unsqueeze", lengths, [2]))
        for name, value, fill in (("tokens", "finished", self.marks.fill), ("logprobs", "finished_logprobs", 0.0)):
            whole = nodes("Slice", carried[value], [0], longest, [1])
            whole = nodes("Reshape", whole, nodes("Concat", shape, longest, axis=0), allowzero=1)
            found[name] = nodes("Where", inside, whole, fill)
        return found


def _longer(nodes: Nodes, texts: str, parents: str, following: str) -> str:
    """The texts of the parents, each with one more."""
    return nodes("Concat", nodes("Gather", texts, parents, axis=0), nodes.column(nodes.flat(following)), axis=1)


def _power(nodes: Nodes, length: str) -> str:
    """What a total is divided by."""
    penalty = nodes.constant(Options().length_penalty, np.float64)
    return nodes("Pow", nodes("Cast", nodes("Max", length, 1), to=_DOUBLE), penalty)


def _all(nodes: Nodes, flags: str) -> str:
    return nodes("Cast", nodes("ReduceMin", nodes("Cast", flags, to=TensorProto.INT32), keepdims=0), to=TensorProto.BOOL)
