"""Sizes at which someone's graph runs, found by trying.

A file names its axes badly or not at all, and says nothing of how they depend on each other: two unnamed batch axes that must
be equal, a mask as long as past and present together, an image that must be a multiple of 32. So a first set of sizes that runs
is looked for among the usual ones; then each axis is moved, alone or with others, to learn which of them belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, islice, product

from runtime.feeds import batch_axis_of
from runtime.signature import Dim, GraphSignature

from .parity import fuzz_sizes

Sizes = dict[str, int]
Runs = Callable[[Sizes], bool]

_ROWS = (3, 1, 2)  # of a batch
_USUAL = (32, 224, 64, 8, 3, 16, 128, 256, 512)  # of images and sequences; nothing in the file says which
_FEW = _USUAL[:4]  # where several axes make many combinations
_MANY = 200  # combinations of one kind
_FIXED_CASES = 3  # where every size is fixed, only the values vary


@dataclass(frozen=True)
class Move:
    """Axes that change together, by multiples of `step`."""

    axes: tuple[str, ...]
    step: int

    def of(self, sizes: Sizes, delta: int) -> Sizes:
        return sizes | {axis: sizes[axis] + delta for axis in self.axes}


def completed(sizes: Sizes) -> Sizes:
    """Axes whose name is a sum ("past + sequence") get the sum of the axes it names."""
    whole = dict(sizes)
    for axis in sizes:
        if (parts := _parts(axis, sizes)) is not None:
            whole[axis] = sum(int(part) if part.isdigit() else sizes[part] for part in parts)
    return whole


def first_sizes(signature: GraphSignature, runs: Runs) -> Sizes | None:
    """Sizes at which the graph runs, or None if it ran at none of those tried."""
    tried: set[tuple[int, ...]] = set()
    for sizes in _candidates(signature):
        whole = completed(sizes)
        key = tuple(whole.values())
        if key not in tried and runs(whole):
            return whole
        tried.add(key)
    return None


def find_moves(base: Sizes, runs: Runs) -> list[Move]:
    """How the axes can move: alone where that runs, else with one other, else with all that have the same size."""
    free = [axis for axis in base if _parts(axis, base) is None]
    moves = {axis: move for axis in free if (move := _first_move([(axis,)], base, runs))}
    for axis in free:
        if axis in moves:
            continue
        others = sorted((other for other in free if other != axis), key=lambda other: other in moves)
        equal = [other for other in others if base[other] == base[axis] and other not in moves]
        pairs = [(axis, other) for other in dict.fromkeys((*equal, *others))]
        groups = [*([(axis, *equal)] if len(equal) > 1 else []), *pairs]
        if move := _first_move(groups, base, runs):
            moves[axis] = move
            if set(move.axes) == {axis, *equal}:
                moves |= dict.fromkeys(move.axes, move)
    found = {frozenset(move.axes): move for move in moves.values()}.values()
    return sorted(found, key=lambda move: min(map(list(base).index, move.axes)))  # small batches first: goldens are these


def tied_axes(base: Sizes, moves: list[Move]) -> dict[str, str]:
    """Axes that are one axis under several names: they have one size, and move only together. Name → the first of them."""
    ties: dict[str, str] = {}
    for move in moves:
        others = [other for item in moves if item is not move for other in item.axes]
        if len(move.axes) > 1 and len({base[axis] for axis in move.axes}) == 1 and not set(move.axes) & set(others):
            first = min(move.axes, key=list(base).index)
            ties |= {axis: first for axis in move.axes if axis != first}
    return ties


def cases_of(base: Sizes, moves: list[Move]) -> list[Sizes]:
    """Each move over small, neighbouring and larger sizes; with several moves also a case where all differ."""
    cases = []
    for move in moves:
        start = base[move.axes[0]]
        deltas = [size - start for size in fuzz_sizes(start)]
        if move.step > 1:
            deltas += [move.step, 2 * move.step]
        cases += [move.of(base, delta) for delta in deltas]
    together, ones = dict(base), dict(base)
    for count, move in enumerate(moves):
        together = move.of(together, move.step * (count + 2))
        ones = move.of(ones, 1 - ones[move.axes[0]])
    cases += [base, together, ones]
    if not base:
        return [{}] * _FIXED_CASES
    whole = [completed(sizes) for sizes in cases if all(size >= 1 for size in sizes.values())]
    return list({tuple(sizes.items()): sizes for sizes in whole}.values())


def _candidates(signature: GraphSignature) -> Iterator[Sizes]:
    """Plain guesses first; then an axis that is the sum of two others; then other choices of which axes count rows."""
    axes = signature.dynamic_axes
    batch = batch_axis_of(signature)
    leading = {spec.shape[0] for spec in signature.inputs if spec.shape} | {batch}

    def guess(rows: int, size: int, small: Collection[Dim | None]) -> Sizes:
        return {axis: rows if axis in small else size for axis in axes}

    for rows, size in product(_ROWS, _USUAL):
        yield guess(rows, size, {batch})
        yield guess(rows, size, leading)
    yield from islice(_sums([guess(rows, size, leading) for rows, size in product(_ROWS[:2], _FEW[::-1])], batch), _MANY)
    others = [axis for axis in axes if axis != batch]
    choices = product(range(1, len(others)), _ROWS[:2], _FEW)
    subsets = (guess(rows, size, {batch, *small}) for count, rows, size in choices for small in combinations(others, count))
    yield from islice(subsets, _MANY)
    for rows in _ROWS:
        yield guess(rows, 1, {batch})  # last, for what does not fit may still broadcast at 1


def _sums(guesses: list[Sizes], batch: str | None) -> Iterator[Sizes]:
    for sizes in guesses:
        others = [axis for axis in sizes if axis != batch]
        for total in others:
            for first, second in combinations([axis for axis in others if axis != total], 2):
                yield sizes | {total: sizes[first] + sizes[second]}


def _first_move(groups: list[tuple[str, ...]], base: Sizes, runs: Runs) -> Move | None:
    for group in groups:
        for step in dict.fromkeys((1, base[group[0]])):
            move = Move(group, step)
            if runs(completed(move.of(base, step))):
                return move
    return None


def _parts(axis: str, sizes: Mapping[str, int]) -> list[str] | None:
    parts = [part.strip() for part in axis.split("+")]
    known = len(parts) > 1 and all(part.isdigit() or (part in sizes and part != axis) for part in parts)
    return parts if known else None
