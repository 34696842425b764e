"""frozen-axes: an axis that is declared dynamic really moves.

Declarations lie: a Reshape to a constant, or an unrolled recurrence, works at the example's size only. So the graph is run at
other sizes, and the shapes that come out are compared with the declared ones. The node that holds the size is named.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.errors import EdgekitError, FeedError
from runtime.feeds import example_feeds
from runtime.session import Session
from runtime.signature import bind_sizes

from ..finding import Finding, Graph, Rule
from ..trial_sizes import Move, completed, find_moves
from .culprit import constants_held, find_culprit

_STEPS = (1, 2, 3)  # how far beyond its base size an axis is moved
_BASES = (2, 8, 32, 224)  # tried in turn where no size is known to work: images are large, batches small
_GUESSES = 4  # sizes read from the graph itself that are tried after those


def run(graph: Graph) -> Iterator[Finding]:
    signature = graph.signature
    if signature is None or not graph.complete:
        return
    if not signature.dynamic_axes:
        shown = ", ".join(map(str, signature.inputs))
        fix = "export with a dynamic batch axis if the device varies it"
        yield Finding("frozen-axes", "info", "", f"every input size is fixed ({shown})", fix)
        return
    try:
        session = Session(graph.path, signature, device="cpu", optimization="basic", log_level=4)
    except EdgekitError:
        return  # the target-operators rule says what onnxruntime cannot load
    known = [dict(graph.sizes)] if graph.sizes else _guesses(graph, signature.dynamic_axes)
    base = next((sizes for sizes in known if _runs(session, sizes)), None)
    if base is None:
        fix = "name the sizes it takes when it is exported"
        reason = f"it runs at none of the sizes tried ({_fault(session, known[0])}), so its axes are unproved"
        yield Finding("frozen-axes", "error" if graph.sizes else "warning", "", reason[:300], fix)
        return
    moves: list[Move] | None = None  # how axes move that do not move freely: looked for only if there are such
    for axis in signature.dynamic_axes:
        for step in (0, *_STEPS):
            sizes = completed(base | {axis: base[axis] + step})
            if fault := _fault(session, sizes):
                moves = find_moves(base, lambda sizes: _fault(session, sizes) is None) if moves is None else moves
                if bound := next((move for move in moves if axis in move.axes), None):
                    yield _bound(axis, bound)
                    break
                yield Finding(
                    "frozen-axes",
                    "error",
                    _culprit(graph, session, base, sizes, base[axis]) or axis,
                    f"axis {axis!r} is declared dynamic but fails at {sizes[axis]}: {fault[:200]}",
                    "let the network read the size from its input (x.flatten(1), x.shape[0]) instead of a number",
                )
                break


def _bound(axis: str, move: Move) -> Finding:
    others = " and ".join(repr(other) for other in move.axes if other != axis)
    together = f"together with {others}" if others else ""
    steps = f"in steps of {move.step}" if move.step > 1 else ""
    how = " and ".join(filter(None, (together, steps)))
    return Finding("frozen-axes", "info", axis, f"axis {axis!r} moves only {how}", "feed sizes that fit together")


def _guesses(graph: Graph, axes: tuple[str, ...]) -> list[dict[str, int]]:
    held = constants_held(graph)[:_GUESSES]
    return [dict.fromkeys(axes, size) for size in (*_BASES, *held)] + [
        dict.fromkeys(axes, _BASES[0]) | {axis: size} for axis in axes for size in held if len(axes) > 1
    ]


def _runs(session: Session, sizes: dict[str, int]) -> bool:
    try:
        session.run(example_feeds(session.signature, sizes))
    except EdgekitError:
        return False
    return True


def _fault(session: Session, sizes: dict[str, int]) -> str | None:
    """Why the graph does not run at these sizes, or gives shapes other than declared; None if it does well."""
    bound = dict(sizes)
    try:
        outputs = session.run(example_feeds(session.signature, sizes))
        for spec in session.signature.outputs:
            bind_sizes(spec, outputs[spec.name], bound)
    except EdgekitError as error:
        return str(error)
    return None


def _culprit(graph: Graph, session: Session, base: dict[str, int], moved: dict[str, int], size: int) -> str:
    """The node that holds the size; at the base size itself nothing can be compared."""
    works, fails = example_feeds(session.signature, base), example_feeds(session.signature, moved)
    return "" if base == moved else find_culprit(graph, works, fails, size, _wrong_outputs(session, moved))


def _wrong_outputs(session: Session, sizes: dict[str, int]) -> tuple[str, ...]:
    bound, wrong = dict(sizes), []
    try:
        outputs = session.run(example_feeds(session.signature, sizes))
    except EdgekitError:
        return ()
    for spec in session.signature.outputs:
        try:
            bind_sizes(spec, outputs[spec.name], bound)
        except FeedError:
            wrong.append(spec.name)
    return tuple(wrong)


RULE = Rule("frozen-axes", "axes declared dynamic really move", run)
