"""Which axes of a network's inputs may vary, found by trying it in PyTorch at other sizes.

An axis is tried alone first. One that cannot move alone may move together with axes of the same size: the two summands of an
addition, keys and values. Such axes form a group, as small as possible, and share one name.

An axis counts only if the network runs at three other sizes, one of them a neighbour of the example's: pooling hides a step of
one, reshaping accepts multiples, and size 1 is broadcast, but none of them passes all three.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.signature import GraphSignature, TensorSpec

from .exportable import GraphSource
from .parity import fresh_inputs, fuzz_sizes

BATCH = "batch"
_SIZES = 3  # other sizes an axis must run at; parity asks for as many
_MOST_TRIALS = 300
_PATIENCE = 30.0  # seconds for all trials; a slow network gets fewer
_MOST_LISTED = 8
_SLOW = 2.0  # seconds a forward may take before only the batch is tried


@dataclass(frozen=True)
class Axis:
    input: str
    axis: int
    size: int

    def __str__(self) -> str:
        return f"{self.input}[{self.axis}]"


Group = tuple[Axis, ...]


class OutOfTrials(Exception):
    """The network is too slow, or has too many axes, to go on trying."""


class NotFinite(Exception):
    """At other sizes the network gives infinities or NaN, which it does not give on its example."""


class Trials:
    """Runs the network at other sizes and tells whether that went well."""

    def __init__(self, graph: GraphSource) -> None:
        self.graph = graph
        specs = (
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(f"{name}[{axis}]" for axis in range(tensor.ndim)))
            for name, tensor in graph.inputs.items()
        )
        self.signature = GraphSignature(tuple(specs), ())
        self.examples = {name: tensor.numpy() for name, tensor in graph.inputs.items()}
        self.left = _MOST_TRIALS
        started = time.perf_counter()
        self.expected = self._outputs({})
        self.seconds = time.perf_counter() - started
        self.left = min(_MOST_TRIALS, int(_PATIENCE / max(self.seconds, 1e-6)))

    def runs(self, sizes: Mapping[Axis, int]) -> dict[str, tuple[int, ...]] | None:
        """The shapes of the outputs, or None if the network fails or gives what cannot be compared."""
        try:
            return self._run(sizes)
        except NotFinite:
            return None

    def _run(self, sizes: Mapping[Axis, int]) -> dict[str, tuple[int, ...]] | None:
        if self.left <= 0:
            raise OutOfTrials
        self.left -= 1
        try:
            outputs = self._outputs({str(axis): size for axis, size in sizes.items()})
        except Exception:  # whatever the network's code raises means that this size is not for it
            return None
        for name, tensor in outputs.items():
            if tensor.ndim != self.expected[name].ndim:
                return None
            if _is_finite(self.expected[name]) and not _is_finite(tensor):
                raise NotFinite
        return {name: tuple(tensor.shape) for name, tensor in outputs.items()}

    def vary(self, group: Group) -> bool:
        """Whether all axes of the group may take other sizes, the same for all."""
        try:
            if self._accepts(group):
                self._run(dict.fromkeys(group, 1))  # may fail, but must not give NaN, as the deviation of a single value does
                return True
        except NotFinite:  # parity could prove nothing there
            pass
        return False

    def _accepts(self, group: Group) -> bool:
        example = group[0].size
        neighbours = [size for size in (example + 1, example - 1) if size >= 1]
        good = 0
        for tried, size in enumerate(dict.fromkeys([*neighbours, *fuzz_sizes(example)])):
            if tried == len(neighbours) and not good:
                return False
            shapes = self._run(dict.fromkeys(group, size))
            # An axis of one is broadcast wherever it is used: only outputs that follow show that it means something.
            follows = shapes is not None and (example != 1 or any(shapes[key] != self._shape(key) for key in shapes))
            good += follows
            if good == _SIZES:
                return True
        return False

    def apart(self, one: Group, other: Group) -> bool:
        """Whether two groups may have sizes independent of each other."""
        for first, second in ((1, 2), (2, 1), (-1, 1), (1, -1)):
            sizes = one[0].size + first, other[0].size + second
            if min(sizes) >= 2 and self.runs(dict.fromkeys(one, sizes[0]) | dict.fromkeys(other, sizes[1])) is not None:
                return True
        return False

    def followers(self, group: Group) -> set[int]:
        """The axes of any output whose size changes with the group's."""
        for step in (1, -1):
            shapes = self.runs(dict.fromkeys(group, group[0].size + step)) if group[0].size + step else None
            if shapes is not None:
                pairs = (
                    (axis, size, self._shape(name)[axis]) for name, shape in shapes.items() for axis, size in enumerate(shape)
                )
                return {axis for axis, size, before in pairs if size != before}
        return set()

    def _shape(self, output: str) -> tuple[int, ...]:
        return tuple(self.expected[output].shape)

    def _outputs(self, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        arrays = fresh_inputs(self.signature, self.examples, sizes, seed=0)
        # The fused attention kernels do not check that keys and values are equally many, and read beyond the shorter.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            return self.graph.call({name: torch.from_numpy(array) for name, array in arrays.items()})


def find_axes(graph: GraphSource) -> tuple[GraphSource, str]:
    """The graph with the axes that may vary, and a note that tells which they are."""
    try:
        trials = Trials(graph)
    except Exception:  # the network's own limit: it runs on its exact example only
        return replace(graph, dynamic_axes={}), "dynamic axes found: none; the network fails on other values than its example's"
    axes = [Axis(name, axis, int(size)) for name, tensor in graph.inputs.items() for axis, size in enumerate(tensor.shape)]
    reason = ""
    if trials.seconds > _SLOW:
        groups = _batch_only(trials, axes)
        reason = f"; only the batch was tried, as a run takes {trials.seconds:.1f} s"
    else:
        groups, complete = _find_groups(trials, axes)
        reason = "" if complete else f"; stopped after {_MOST_TRIALS - max(trials.left, 0)} runs"
    named = name_groups(graph, groups, trials)
    found: dict[str, dict[int, str]] = {}
    for axis in axes:
        for name, group in named.items():
            if axis in group:
                found.setdefault(axis.input, {})[axis.axis] = name
    note = f"dynamic axes found: {_summary(named)}{reason}; declare dynamic_axes to override"
    return replace(graph, dynamic_axes=found, axes_were_found=True), note


def _summary(named: Mapping[str, Group]) -> str:
    """All axes where they are few; of many, as with a cache for every layer, one of each name."""
    if sum(map(len, named.values())) <= _MOST_LISTED:
        return ", ".join(f"{axis} {name}" for name, group in named.items() for axis in group) or "none"
    more = {name: f" and {len(group) - 1} more" if len(group) > 1 else "" for name, group in named.items()}
    return ", ".join(f"{group[0]}{more[name]} {name}" for name, group in named.items())


def name_groups(graph: GraphSource, groups: Iterable[Group], trials: Trials) -> dict[str, Group]:
    """A readable name for every group: batch, height, width, time, or its first axis."""
    named: dict[str, Group] = {}
    groups = sorted(groups, key=lambda group: group[0].axis != 0)  # the batch has the first choice
    for group in groups:
        first = group[0]
        tensor = graph.inputs[first.input]
        name = re.sub(r"\W", "_", f"{first.input}_{first.axis}")
        if BATCH not in named and all(axis.axis == 0 for axis in group) and _leads(trials, group):
            name = BATCH
        elif _is_image_side(graph, groups, first):
            name = {2: "height", 3: "width"}[first.axis]
        elif all(axis.axis == 1 for axis in group) and (tensor.ndim == 3 if tensor.is_floating_point() else tensor.ndim == 2):
            name = "time"
        if name in named:
            name = re.sub(r"\W", "_", f"{first.input}_{first.axis}")
        named[name] = group
    return named


def _find_groups(trials: Trials, axes: list[Axis]) -> tuple[list[Group], bool]:
    """Groups that may vary independently of each other, and whether the search came to its end."""
    groups: list[Group] = []
    try:
        for axis in axes:  # one at a time: what was found stays if the search is cut short
            if trials.vary((axis,)):
                groups.append((axis,))
        rest = [axis for axis in axes if (axis,) not in groups]
        while rest:
            seed = rest.pop(0)
            group = _smallest_group(trials, seed, [axis for axis in rest if axis.size == seed.size])
            if group:
                groups.append(group)
                rest = [axis for axis in rest if axis not in group]
        groups = _with_idle_masks(trials, sorted(groups, key=lambda group: axes.index(group[0])))
        return _independent(trials, groups), True
    except OutOfTrials:
        return groups if _all_distinct(trials, groups) else groups[:1], False  # one group cannot contradict another


def _smallest_group(trials: Trials, seed: Axis, peers: list[Axis]) -> Group | None:
    same_place = [axis for axis in peers if axis.axis == seed.axis]
    for company in (same_place, peers) if len(same_place) < len(peers) else (peers,):
        if company and trials.vary((seed, *company)):
            for axis in list(company):
                without = [item for item in company if item != axis]
                if without and trials.vary((seed, *without)):
                    company = without
            return (seed, *company)
    return next(((seed, peer) for peer in peers if trials.vary((seed, peer))), None)


def _with_idle_masks(trials: Trials, groups: list[Group]) -> list[Group]:
    """Axes of constant inputs, joined with those of the same place and size elsewhere.

    A mask of ones may be skipped by the network, so that its sizes seem free; once it masks something they are not.
    """
    kept: list[Group] = []
    for group in groups:
        first = group[0]
        values = trials.graph.inputs[first.input]
        if len(group) == 1 and values.numel() > 1 and bool((values == values.flatten()[0]).all()):
            hosts = [
                item
                for item in groups
                if item[0].input != first.input and (item[0].axis, item[0].size) == (first.axis, first.size)
            ]
            host = next((index for index, item in enumerate(kept) if any(item[0] == other[0] for other in hosts)), None)
            if host is not None and not trials.followers(group) and trials.vary(kept[host] + group):
                kept[host] = kept[host] + group
                continue
        kept.append(group)
    return kept


def _independent(trials: Trials, groups: list[Group]) -> list[Group]:
    """Groups that turn out to depend on each other are joined if their sizes are equal; otherwise the later one is fixed."""
    if len(groups) < 2:
        return groups
    if _all_distinct(trials, groups):
        return groups
    kept: list[Group] = []
    for group in groups:
        clash = next((index for index, other in enumerate(kept) if not trials.apart(other, group)), None)
        if clash is None:
            kept.append(group)
        elif kept[clash][0].size == group[0].size and trials.vary(kept[clash] + group):
            kept[clash] = kept[clash] + group
    return kept


def _all_distinct(trials: Trials, groups: list[Group]) -> bool:
    """Whether the network runs with every group at a size that no other has. Asked of an exhausted search too."""
    sizes: dict[Axis, int] = {}
    for group in groups:
        size = group[0].size + 1
        while size in sizes.values():
            size += 1
        sizes |= dict.fromkeys(group, size)
    trials.left = max(trials.left, 1)
    return trials.runs(sizes) is not None


def _batch_only(trials: Trials, axes: list[Axis]) -> list[Group]:
    first = tuple(axis for axis in axes if axis.axis == 0)
    alike = len({axis.size for axis in first}) == 1 and len(first) == len(trials.graph.inputs)
    try:
        return [first] if alike and trials.vary(first) else []
    except OutOfTrials:
        return []


def _leads(trials: Trials, group: Group) -> bool:
    try:
        return 0 in trials.followers(group)
    except OutOfTrials:
        return True


def _is_image_side(graph: GraphSource, groups: Iterable[Group], side: Axis) -> bool:
    """Whether this is the height or width of an image: both vary, each by itself, and the number of channels does not."""
    tensor = graph.inputs[side.input]
    if tensor.ndim != 4 or not tensor.is_floating_point() or side.axis not in (2, 3):
        return False
    moving = [{axis.axis for axis in group if axis.input == side.input} for group in groups]
    return {2} in moving and {3} in moving and {1} not in moving


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or math.isfinite(float(tensor.abs().sum(dtype=torch.float64)))
