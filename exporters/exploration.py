"""What `--scheme auto` tries, in this order, as long as there is time.

    alone      every scheme on all that it can take, with its settings varied where that may help
    together   the fastest of them without operators or narrow convolutions, and with another scheme on what they leave
    pruned     where quality misses the budget: without the nodes that cost most (sensitivity.py), which another scheme takes
    stored     whatever is still in float32, stored in 16 bits, which costs no time

Every stage sees what the ones before it measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from architectures.settings import apply_settings
from runtime.bundle import DECODER

from .candidates import Candidate, Laboratory, Measured
from .preference import EQUALLY_FAST, Preference, Tried, is_alone
from .quantized_graphs import Part
from .quantizers import SCHEMES, scheme_for
from .quantizers.recurrent import FLOAT32, INT8, OPERATORS, STEP_BY_STEP
from .quantizers.scheme import HALVES, Scheme, quantizable
from .sensitivity import sensitivity
from .weights import read_mapped

_LIKELIEST_FIRST = ("int8-static", "int8-weights", "int8-dynamic", "int4-weights", "fp16", "bf16")
_LIKELIEST_OF_DECODERS = ("int4-weights", "int8-weights", "int8-static", "int8-dynamic", "fp16", "bf16")
_WORTH_STORING = 0.01  # of all weights
_HARDLY_SMALLER = 0.9  # of the original's size: a scheme that takes so little is not tried with other settings
_NARROW = 32  # channels: convolutions with fewer are often slower in int8
_WANTS_SAMPLES = "it needs samples to calibrate on; pass them with --data"
LAST = 3.0  # candidates' worth of time that the last race of one takes
_VARIED: dict[str, tuple[dict[str, Any], ...]] = {  # settings tried when a scheme's own miss the budget of quality
    "int8-static": ({"ranges": "percentile"}, {"ranges": "mse"}),
    "int4-weights": ({"head": "8"}, {"block": 32}),
}
_SMALLER: dict[str, tuple[dict[str, Any], ...]] = {"int4-weights": ({"block": 256},)}  # … and when they meet it
_STORED = ("fp16", {"arithmetic": "float32"})


class Exploration:
    """What was tried so far says what to try next."""

    def __init__(self, laboratory: Laboratory, preference: Preference, progress: Callable[[str], None]) -> None:
        self._laboratory, self._preference, self._progress = laboratory, preference, progress
        self._bundle = laboratory.setting.bundle
        self._calibration = laboratory.setting.calibration
        self.errors: dict[str, float] = {}  # of nodes, where sensitivity was asked for
        self.is_complete = True  # False: time was up before everything had been tried

    def run(self) -> None:
        for stage in (self._alone, self._together, self._pruned, self._stored):
            for candidate in stage():
                if self.ran() and not self._laboratory.has_time_for(1 + LAST):
                    self.is_complete = False
                    return
                self._laboratory.measure(candidate)

    def _alone(self) -> Iterator[Candidate]:
        """Every scheme, before any is tried with other settings."""
        tried: list[tuple[Scheme, Measured]] = []
        for name in self._applicable():
            scheme = self._scheme(name)
            first = self._varied(scheme, _STORED[1] if name == _STORED[0] else {})
            yield first
            tried.append((scheme, self._laboratory.measure(first)))
            if name == _STORED[0]:
                yield self._varied(scheme, {})
                if self._preference.is_good(tried[-1][1]):
                    break  # bf16 is as small and as fast, and rounds more
        for scheme, found in tried:
            for settings in self._further(scheme, found):
                yield self._varied(scheme, settings)

    def _applicable(self) -> list[str]:
        """A decoder reads all its weights for every token, and fewer bytes are what makes it faster."""
        order = _LIKELIEST_OF_DECODERS if DECODER in self._bundle.manifest.graphs else _LIKELIEST_FIRST
        return [name for name in order if not self._lacks_samples(name)]

    def _lacks_samples(self, name: str) -> bool:
        return self._scheme(name).needs_calibration and self._calibration is None

    def _further(self, scheme: Scheme, found: Measured) -> Iterator[Mapping[str, Any]]:
        if found.problem is not None or found.bytes > _HARDLY_SMALLER * self._bundle.graph_bytes:
            return
        if not self._preference.is_good(found):
            yield from _VARIED.get(scheme.name, ())
        else:
            yield from _SMALLER.get(scheme.name, ())
        reasons = [node.reason for node in found.nodes if node.quantized and node.operator in OPERATORS]
        if reasons and hasattr(scheme.settings, "recurrence"):
            in_steps = all(reason.startswith(STEP_BY_STEP) for reason in reasons)
            yield {"recurrence": FLOAT32 if in_steps else INT8}

    def _varied(self, scheme: Scheme, settings: Mapping[str, Any]) -> Candidate:
        text = ", ".join(f"{key}={value}" for key, value in settings.items())
        label = f"{scheme.name} ({text})" if text else scheme.name
        return Candidate(label, (Part(scheme.name, apply_settings(scheme.settings, settings)),))

    def _together(self) -> Iterator[Candidate]:
        """The fastest schemes without what they are slow on, and with another one on what they leave."""
        narrow = self._narrow_convolutions()
        fastest = self._fastest(2)
        slow = [item for item in self._fastest(len(SCHEMES)) if item not in fastest and not self._is_no_slower(item[1])]
        for candidate, measured in [*fastest, *slow]:
            quantized = [node for node in measured.nodes if node.quantized]
            operators = {node.operator for node in quantized}
            left_out = sorted(operators) if (candidate, measured) in fastest else ["Conv"] if "Conv" in operators else []
            for operator in left_out if len(operators) > 1 else ():
                kept = [node for node in quantized if node.operator != operator]
                if operator != "Gather" and any(node.operator != "Gather" for node in kept):  # tables cost no time
                    part = replace(candidate.parts[0], nodes=frozenset(node.node for node in kept))
                    yield Candidate(f"{candidate.label} without {operator}", (part,))
            wide = frozenset(node.node for node in quantized) - narrow
            takes_activations = self._scheme(candidate.parts[0].scheme).needs_calibration
            if (
                takes_activations
                and len(wide) < len(quantized)
                and any(node.operator == "Conv" for node in quantized if node.node in wide)
            ):
                label = f"{candidate.label} without convolutions of under {_NARROW} channels"
                yield Candidate(label, (replace(candidate.parts[0], nodes=wide),))
        for candidate, measured in self._fastest(3):
            taken = {node.node for node in measured.nodes if node.quantized}
            others = [item for item in self._fastest(len(SCHEMES)) if item[0].parts[0].scheme != candidate.parts[0].scheme]
            for other, found in others[:3]:
                rest = frozenset(node.node for node in found.nodes if node.quantized) - taken
                if rest and self._share(found, rest) >= _WORTH_STORING and self._is_no_slower(found):
                    part = replace(other.parts[0], nodes=rest)
                    yield Candidate(f"{candidate.label} + {other.label}", (*candidate.parts, part))

    def _narrow_convolutions(self) -> frozenset[str]:
        found = set()
        graphs = self._bundle.manifest.graphs
        for name in graphs:
            model = quantizable(read_mapped(self._bundle.graph_path(name)))
            kernels = {tensor.name: tensor.dims for tensor in model.graph.initializer if len(tensor.dims) == 4}
            for node in model.graph.node:
                if node.op_type == "Conv" and node.input[1] in kernels and min(kernels[node.input[1]][:2]) < _NARROW:
                    found.add(f"{name}: {node.name}" if len(graphs) > 1 else node.name)
        return frozenset(found)

    def _pruned(self) -> Iterator[Candidate]:
        """The fastest that lose too much, without the nodes that cost most; those go to a scheme that does not."""
        for candidate, measured in self._nearest(2):
            labels = [node.node for node in measured.nodes if node.quantized]
            if self._preference.is_good(measured) or len(labels) < 2 or not self._is_no_slower(measured):
                continue
            self._progress(f"how much each of {len(labels)} nodes costs in {candidate.label}")
            part, stop = candidate.parts[0], lambda: not self._laboratory.has_time_for(1 + LAST)
            errors = sensitivity(self._bundle, part, labels, self._calibration, stop=stop)
            self.errors |= errors
            if not errors:  # time was up
                self.is_complete = False
                return
            ranked = sorted(errors, key=lambda label: -errors[label])
            count = _fewest_to_leave_out(
                [errors[label] for label in ranked], self._preference.allowed / max(measured.drop, 1e-9)
            )
            while ranked and count < len(ranked):
                pruned = self._without(candidate, ranked[:count], ranked[count:])
                yield pruned
                if self._preference.is_good(self._laboratory.measure(pruned)):
                    break
                count *= 2

    def _without(self, candidate: Candidate, left: Sequence[str], kept: Sequence[str]) -> Candidate:
        label = f"{candidate.label} without {len(left)} {'node' if len(left) == 1 else 'nodes'}"
        part = replace(candidate.parts[0], nodes=frozenset(kept))
        for other, found in self._fastest(len(SCHEMES)):
            takes = frozenset(node.node for node in found.nodes if node.quantized) & frozenset(left)
            is_another = other.parts[0].scheme != candidate.parts[0].scheme  # none can take a graph twice
            if is_another and takes and self._preference.is_good(found) and self._is_no_slower(found):
                return Candidate(f"{label} + {other.label}", (part, replace(other.parts[0], nodes=takes)))
        return Candidate(label, (part,))

    def _stored(self) -> Iterator[Candidate]:
        """The best so far with everything else in 16 bits."""
        whole_candidate = self._varied(self._scheme(_STORED[0]), _STORED[1])
        whole = self._laboratory.measure(whole_candidate)
        for candidate, measured in self.best()[:3]:
            if candidate.parts[-1].scheme in HALVES:
                continue
            rest = frozenset(node.node for node in whole.nodes if node.quantized)
            rest -= {node.node for node in measured.nodes if node.quantized}
            if rest and self._share(whole, rest) >= _WORTH_STORING:
                part = replace(whole_candidate.parts[0], nodes=rest)
                yield Candidate(f"{candidate.label} + fp16 stored", (*candidate.parts, part))

    def _is_no_slower(self, measured: Measured) -> bool:
        return self._preference.budget.for_size or (measured.ratio.low or measured.ratio.median) <= 1.0

    def ran(self) -> list[Tried]:
        return [(candidate, found) for candidate, found in self._laboratory.results.values() if found.problem is None]

    def _fastest(self, count: int, *, good: bool = True) -> list[Tried]:
        """Schemes alone that quantize, the fastest first; with `good` those within the budget of quality come first."""
        ran = [item for item in self.ran() if is_alone(item[0]) and item[0].parts[0].scheme not in HALVES]
        best = sorted(ran, key=lambda item: (good and not self._preference.is_good(item[1]), item[1].ratio.median))
        each = {item[0].parts[0].scheme: item for item in reversed(best)}  # the best of each scheme
        return [item for item in best if each[item[0].parts[0].scheme] is item][:count]

    def _nearest(self, count: int) -> list[Tried]:
        """Schemes alone that quantize, the fastest first: each with the settings that lose least of those as fast."""
        found = []
        for candidate, measured in self._fastest(count, good=False):
            as_fast = [
                item
                for item in self.ran()
                if is_alone(item[0])
                and item[0].parts[0].scheme == candidate.parts[0].scheme
                and item[1].ratio.median <= EQUALLY_FAST * measured.ratio.median
                and isfinite(item[1].drop)
            ]
            found.append(min(as_fast, key=lambda item: item[1].drop, default=(candidate, measured)))
        return found

    def best(self) -> list[Tried]:
        """All that may be within the budget, the best first."""
        original_us = self._laboratory.original_us
        return self._preference.ranked([item for item in self.ran() if self._preference.may_fit(item[1], original_us)])

    def _share(self, measured: Measured, labels: frozenset[str]) -> float:
        """Of all weights, how many these nodes have."""
        total = sum(node.weights for node in measured.nodes)
        return sum(node.weights for node in measured.nodes if node.node in labels) / max(1, total)

    def _scheme(self, name: str) -> Scheme:
        return scheme_for(name, self._bundle.manifest)

    def tried(self) -> tuple[Measured, ...]:
        """All that was measured, and what could not be for want of samples."""
        left = [Measured(name, problem=_WANTS_SAMPLES) for name in _LIKELIEST_FIRST if self._lacks_samples(name)]
        return *(found for _, found in self._laboratory.results.values()), *left

    def untried(self) -> tuple[str, ...]:
        """Schemes that time was up before."""
        begun = {candidate.parts[0].scheme for candidate, _ in self._laboratory.results.values()}
        if _STORED[0] in begun:
            begun.add("bf16")  # it is tried where storing fp16 fails
        return () if self.is_complete else tuple(name for name in self._applicable() if name not in begun)


def _fewest_to_leave_out(errors: Sequence[float], share: float) -> int:
    """How many of the largest errors to drop until this share of the whole error is left, if they add up as squares."""
    if not all(error < float("inf") for error in errors):
        return max(1, sum(error == float("inf") for error in errors))
    left = sum(error**2 for error in errors)
    allowed, count = left * share**2, 0
    for error in errors:
        if left <= allowed:
            break
        left -= error**2
        count += 1
    return max(1, count)
