"""Heads inside the graph: instead of logits over a vocabulary, the tokens chosen from them leave it.

    argmax     logits (…, vocabulary) → token (…): the likeliest
    top-k=8    logits (…, vocabulary) → top.logprobs and top.tokens (…, 8): log-softmax, largest first

Goldens follow: they are computed from the golden logits. A token can only be proved where the logits say clearly which it is,
that is, where neighbours in rank are further apart than twice the error a logit may have; a row with a closer pair is a tie
within noise and leaves the goldens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from runtime.bundle import Bundle, GoldenEntry, Manifest, Tolerance, pack_golden
from runtime.errors import OptionError, ParityRefused
from runtime.signature import GraphSignature, TensorSpec

from .graph import copy_of
from .parity import Arrays
from .pass_trials import Trial, Trials

LOGITS = "logits"
TOKEN, LOGPROBS, TOKENS = "token", "top.logprobs", "top.tokens"
_EXACT = Tolerance(0.0, 0.0, "tokens must be equal; rows with ties within the error of the logits are not among the goldens")
_EPSILON = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Head:
    """`k` is None for the arg-max."""

    k: int | None = None

    @classmethod
    def parse(cls, text: str) -> Head:
        kind, _, number = text.partition("=")
        if text == "argmax":
            return cls()
        if kind == "top-k" and number.isdigit() and int(number) > 0:
            return cls(int(number))
        raise OptionError(f"there is no head {text!r}; write argmax, or top-k=8 for the eight likeliest")

    def __str__(self) -> str:
        return "argmax" if self.k is None else f"top-k={self.k}"

    @property
    def ranks(self) -> int:
        """How many of the largest logits decide what comes out: a tie with the next one counts too."""
        return 2 if self.k is None else self.k + 1


def add_head(
    head: Head, models: Mapping[str, onnx.ModelProto], manifest: Manifest, bundle: Bundle
) -> tuple[dict[str, onnx.ModelProto], Manifest, dict[str, bytes | Path]]:
    """The models, the manifest and the goldens with the head in place of every output named logits."""
    named = [name for name, graph in manifest.graphs.items() if LOGITS in {spec.name for spec in graph.signature.outputs}]
    if not named:
        outputs = sorted({spec.name for graph in manifest.graphs.values() for spec in graph.signature.outputs})
        raise OptionError(f"{manifest.name} has no output 'logits' for a head to read; it has: {', '.join(outputs)}")
    new_models, graphs, tolerance = dict(models), dict(manifest.graphs), dict(manifest.tolerance)
    goldens: dict[str, bytes | Path] = {
        golden.file: bundle.root / golden.file for golden in manifest.goldens if golden.graph not in named
    }
    for name in named:
        signature = _signature(head, manifest.graphs[name].signature)
        graphs[name] = replace(manifest.graphs[name], signature=signature)
        tolerance[name] = _tolerance(head, manifest.tolerance[name], bundle, name)
        new_models[name] = _with_head(head, models[name], signature)
        trials = _trials(head, name, bundle, manifest.graphs[name].signature)
        _refuse_difference(head, new_models[name], signature, tolerance[name], trials)
        goldens |= {trial.label: pack_golden(trial.inputs, trial.expected) for trial in trials}
    kept = tuple(GoldenEntry(golden.graph, golden.file) for golden in manifest.goldens if golden.file in goldens)
    task = "tensors" if manifest.task == "classification" else manifest.task  # a classifier promises logits
    return new_models, replace(manifest, task=task, graphs=graphs, tolerance=tolerance, goldens=kept), goldens


def _signature(head: Head, signature: GraphSignature) -> GraphSignature:
    logits = next(spec for spec in signature.outputs if spec.name == LOGITS)
    vocabulary = logits.shape[-1]
    if len(logits.shape) not in (2, 3) or not isinstance(vocabulary, int) or logits.dtype != "float32":
        raise OptionError(
            f"a head reads float32 logits [batch, classes] or [batch, time, vocabulary], and this graph has {logits}"
        )
    if head.k is not None and head.k >= vocabulary:
        raise OptionError(f"top-k={head.k} of a vocabulary of {vocabulary} leaves nothing out; ask for fewer than {vocabulary}")
    before = logits.shape[:-1]
    if head.k is None:
        new = [TensorSpec(TOKEN, "int64", before)]
    else:
        new = [TensorSpec(LOGPROBS, "float32", (*before, head.k)), TensorSpec(TOKENS, "int64", (*before, head.k))]
    outputs = [item for spec in signature.outputs for item in (new if spec is logits else [spec])]
    return GraphSignature(signature.inputs, tuple(outputs), signature.states)


def _with_head(head: Head, model: onnx.ModelProto, signature: GraphSignature) -> onnx.ModelProto:
    model = copy_of(model)
    graph = model.graph
    if head.k is None:
        graph.node.append(helper.make_node("ArgMax", [LOGITS], [TOKEN], name="head.ArgMax", axis=-1, keepdims=0))
    else:
        graph.initializer.append(numpy_helper.from_array(np.array([head.k], np.int64), "head.k"))
        graph.node.append(helper.make_node("LogSoftmax", [LOGITS], ["head.logprobs"], name="head.LogSoftmax", axis=-1))
        top = helper.make_node("TopK", ["head.logprobs", "head.k"], [LOGPROBS, TOKENS], name="head.TopK", axis=-1, sorted=1)
        graph.node.append(top)
    known = {value.name: value for value in graph.output}
    made = [known.get(spec.name) or _value_info(spec) for spec in signature.outputs]
    graph.value_info.append(known[LOGITS])
    del graph.output[:]
    graph.output.extend(made)
    return model


def _value_info(spec: TensorSpec) -> onnx.ValueInfoProto:
    kind = TensorProto.INT64 if spec.dtype == "int64" else TensorProto.FLOAT
    return helper.make_tensor_value_info(spec.name, kind, list(spec.shape))


def _tolerance(head: Head, before: Mapping[str, Tolerance], bundle: Bundle, name: str) -> dict[str, Tolerance]:
    after = {output: tolerance for output, tolerance in before.items() if output != LOGITS}
    if head.k is None:
        return after | {TOKEN: _EXACT}
    largest = max(
        (
            float(np.abs(log_softmax(expected[LOGITS])).max(initial=0.0))
            for entry, _, expected in bundle.goldens()
            if entry.graph == name
        ),
        default=0.0,
    )
    logits = before[LOGITS]
    allowed = 2 * logits.allowed + 10 * _EPSILON * largest
    text = f"twice the logits' {logits.allowed:.2e} (its own error and that of the sum) and ten roundings of the largest value"
    return after | {LOGPROBS: Tolerance(allowed, 2 * logits.measured, text), TOKENS: _EXACT}


def _trials(head: Head, name: str, bundle: Bundle, signature: GraphSignature) -> list[Trial]:
    """The goldens of the graph without rows that hold a tie, with what the head makes of their logits."""
    allowed = bundle.manifest.tolerance[name][LOGITS].allowed
    trials = []
    for entry, inputs, expected in bundle.goldens():
        if entry.graph != name or LOGITS not in expected:
            continue
        clear = _clear_rows(head, expected[LOGITS], 2 * allowed)
        if not clear.all():
            inputs, expected = _rows(clear, inputs, signature.inputs), _rows(clear, expected, signature.outputs)
        if expected[LOGITS].shape[0] and _is_cut(clear, expected[LOGITS]):
            trials.append(Trial(entry.file, signature.check_feeds(inputs), inputs, _answers(head, expected)))
    if not trials:
        raise ParityRefused(
            f"head {head} was not added: every row of the goldens has logits closer than {2 * allowed:.1e} (twice the "
            f"error they may have) among the first {head.ranks}, so its tokens "
            "cannot be proved; use trained weights or a smaller k"
        )
    return trials


def _clear_rows(head: Head, logits: NDArray[Any], margin: float) -> NDArray[np.bool_]:
    """The rows (along the first axis) in which no two of the largest logits are a tie."""
    ranked = -np.sort(-logits.astype(np.float64), axis=-1)[..., : head.ranks]
    gaps = ranked[..., :-1] - ranked[..., 1:]
    return np.asarray((gaps > margin).reshape(len(logits), -1).all(axis=1))


def _rows(kept: NDArray[np.bool_], arrays: Arrays, specs: tuple[TensorSpec, ...]) -> Arrays:
    """Only the kept rows of every tensor that has the batch axis; the batch axis is the one named so."""
    axes = {spec.name: spec.shape.index("batch") if "batch" in spec.shape else None for spec in specs}
    return {
        name: array if (axis := axes[name]) is None else np.ascontiguousarray(np.compress(kept, array, axis=axis))
        for name, array in arrays.items()
    }


def _is_cut(clear: NDArray[np.bool_], logits: NDArray[Any]) -> bool:
    """Whether the tied rows are gone: they stay where the graph has no axis named batch."""
    return len(logits) == int(clear.sum())


def _answers(head: Head, expected: Arrays) -> Arrays:
    logits = expected[LOGITS]
    others = {name: array for name, array in expected.items() if name != LOGITS}
    if head.k is None:
        return others | {TOKEN: logits.argmax(-1).astype(np.int64)}
    order = np.argsort(-logits, axis=-1, kind="stable")[..., : head.k]
    logprobs = np.take_along_axis(log_softmax(logits), order, axis=-1)
    return others | {LOGPROBS: logprobs.astype(np.float32), TOKENS: order.astype(np.int64)}


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _refuse_difference(
    head: Head,
    model: onnx.ModelProto,
    signature: GraphSignature,
    tolerance: Mapping[str, Tolerance],
    trials: list[Trial],
) -> None:
    allowed = {output: item.allowed for output, item in tolerance.items()}
    _, failed, _ = Trials(signature, allowed, tuple(trials), ()).judge(model)
    if failed is not None:
        raise ParityRefused(
            f"head {head} was not added: output {failed.output!r} at {failed.golden} {failed.problem} "
            f"(allowed {failed.allowed:.2e})"
        )
