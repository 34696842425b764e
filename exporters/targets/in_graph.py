"""Generation as one graph: encoder, decoder and the choice of tokens, in an ONNX `Loop` that any host runs with one call.

    language models     prompt (batch, time), max_new_tokens ()  → tokens, lengths, score, logprobs
    encoder–decoders    source (batch, source), max_new_tokens () → the same

A turn of the loop feeds tokens to the decoder and chooses the next ones; the decoder's states are values that the loop carries.
The first turn feeds the whole prompt (an encoder–decoder's is its first token), with states that are empty. So the decoder is
in the graph once, and its weights, which lie in the outer graph, are stored once. Of a decoder with a second form for prompts
the first turn, with that form, stands before the loop.

`prompt` may be padded, at either end of a row, where the network has a padding token; without one all rows are equally long.
`source` is padded as the encoder takes it: on the right. `max_new_tokens` is 1 or more.

`tokens` is (batch, generated) or, of several beams, (batch, beams, generated), the best first: with the <eos> that ends a text,
and padding behind it; `lengths` counts them. `score` is the sum of `logprobs` over the length ** length_penalty. Where a search
found fewer texts than beams, those that are not there have length 0 and score -inf. A text ends with <eos>, at
`max_new_tokens`, or where the network's positions end; the loop ends when all texts have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from runtime.bundle import DECODER, ENCODER, MANY, Bundle
from runtime.errors import OptionError
from runtime.generation.wrapped import PROMPT, ROOM
from runtime.signature import GraphSignature, StateSpec, TensorSpec
from runtime.state import LOGITS, SOURCE, TOKENS, WANTED

from ..graph import read_model
from .choosing import Beams, Greedy, Marks, Turn
from .graph_parts import Nodes, Weights, joined_opsets, prepared, value_info

Choice = Greedy | Beams
OUTPUTS = ("tokens", "lengths", "score", "logprobs")


@dataclass(frozen=True)
class Parts:
    """What a bundle that generates is made of."""

    models: Mapping[str, onnx.ModelProto]  # decoder, and perhaps encoder and the decoder's form for prompts
    decoder: GraphSignature
    marks: Marks
    bos: int | None
    positions: int | None  # that prompt and text may have together; None: any number
    fixed_capacity: int | None = None

    @classmethod
    def of(cls, bundle: Bundle) -> Parts:
        manifest = bundle.manifest
        if DECODER not in manifest.graphs or manifest.generation is None:
            raise OptionError(
                f"{manifest.name} does not generate text: its task is {manifest.task!r} and its graphs are "
                f"{', '.join(manifest.graphs)}; wrap a language model or an encoder–decoder"
            )
        signature = manifest.graphs[DECODER].signature
        about = manifest.generation
        marks = Marks(_vocabulary(signature), about.get("pad"), about.get("eos"))
        _refuse_fixed(signature, manifest.graphs[ENCODER].signature if ENCODER in manifest.graphs else None)
        if ENCODER in manifest.graphs and about.get("bos") is None:
            raise OptionError(
                f"{manifest.name} names no token that its decoder begins with; export it with tokenizers, as a run that was "
                "trained on text has them"
            )
        capacity = _fixed_capacity(signature)
        limits = [limit for limit in (about.get("longest"), capacity) if limit is not None]
        forms = (ENCODER, DECODER) if ENCODER in manifest.graphs else (DECODER, MANY)  # as in runtime/generation/requests.py
        names = [name for name in forms if name in manifest.graphs]
        models = {name: prepared(read_model(bundle.graph_path(name))) for name in names}
        return cls(models, signature, marks, about.get("bos"), min(limits, default=None), capacity)

    @property
    def has_encoder(self) -> bool:
        return ENCODER in self.models

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return self.decoder.states

    def spec(self, name: str) -> TensorSpec:
        return next(spec for spec in self.decoder.inputs if spec.name == name)

    @property
    def memory(self) -> list[str]:
        """What the encoder gives and every turn takes unchanged."""
        other = {TOKENS, WANTED, *(state.input for state in self.states)}
        return [spec.name for spec in self.decoder.inputs if spec.name not in other]


def generator_graph(parts: Parts, beams: int) -> tuple[onnx.ModelProto, GraphSignature]:
    """The graph "generator" of a bundle's parts."""
    choice: Choice = Greedy(parts.marks) if beams == 1 else Beams(parts.marks, beams)
    weights = Weights()
    nodes = Nodes("", weights)
    given = SOURCE if parts.has_encoder else PROMPT
    batch = nodes.size(given, 0)
    encoded = nodes.copy(parts.models[ENCODER], {_source_name(parts): given}, "encoder/") if parts.has_encoder else {}
    if parts.has_encoder:
        begin = nodes.filled(nodes("Concat", batch, [1], axis=0), parts.bos, np.int64)
        used = nodes.filled(batch, 1, np.int64)
    else:
        begin, used = _prompt(nodes, parts, given)
    room = _room(nodes, parts, used)  # (batch)
    most = nodes("ReduceMax", room, keepdims=0)
    source_rows: str | None = None  # of the encoder's outputs, for each row of the first turn
    if parts.has_encoder and beams > 1:
        source_rows = nodes("Div", nodes.range(nodes("Mul", batch, [beams])), beams)
        begin = nodes("Gather", begin, source_rows, axis=0)
    memory = {name: _rows(nodes, encoded[name], source_rows, 0) for name in parts.memory}
    states = _first_states(nodes, parts, begin, most, encoded, source_rows)
    own = (
        choice.first(nodes, begin, batch)
        if isinstance(choice, Greedy)
        else choice.first(nodes, begin, batch, repeated=parts.has_encoder)
    )
    start = Values(dict(zip((item.name for item in choice.carried), own, strict=True)), states)
    end, collected = _loop(nodes, parts, choice, start, memory, room, most)
    results = choice.results(nodes, end.own, collected, batch)
    for name in OUTPUTS:
        nodes.named(results[name], name)
    signature = _signature(parts, given, beams)
    return _model(parts, nodes, weights, signature), signature


@dataclass(frozen=True)
class Values:
    """What goes from turn to turn, by name: the choice's own values, and the decoder's states by the names of its inputs."""

    own: dict[str, str]
    states: dict[str, str]

    @property
    def all(self) -> list[str]:
        return [*self.own.values(), *self.states.values()]


def _loop(
    nodes: Nodes, parts: Parts, choice: Choice, start: Values, memory: Mapping[str, str], room: str, most: str
) -> tuple[Values, dict[str, str]]:
    """The values after the last turn, and what was collected, (turns, batch) each.

    With a form for prompts the first turn stands before the loop. An `If` inside it would do, too, but onnxruntime does not
    prepare the weights of graphs that deep: MatMulNBits would be slow, and give other numbers.
    """
    goes_on, turns, before = nodes.constant(True, np.bool_), most, 0
    first: list[str] = []
    if MANY in parts.models:
        start, taken = _turn(nodes, parts, choice, MANY, start, memory, nodes.constant(0), room)
        first = [nodes("Unsqueeze", value, [0]) for value in taken.collected]
        goes_on, turns, before = nodes("Not", taken.all_ended), nodes("Sub", most, 1), 1
    body = _body(parts, choice, nodes.weights, memory, room, before)
    after = list(nodes.several("Loop", len(body.output) - 1, turns, goes_on, *start.all, body=body))
    end = Values(dict(zip(start.own, after, strict=False)), dict(zip(start.states, after[len(start.own) :], strict=False)))
    collected = after[len(start.all) :]
    if first:
        collected = [nodes("Concat", one, others, axis=0) for one, others in zip(first, collected, strict=True)]
    return end, dict(zip((name for name, _ in choice.collected), collected, strict=True))


def _turn(
    nodes: Nodes,
    parts: Parts,
    choice: Choice,
    form: str,
    values: Values,
    memory: Mapping[str, str],
    turn: str,
    room: str,
) -> tuple[Values, Turn]:
    """Feed the decoder and choose."""
    given = {TOKENS: values.own["fed"], **memory, **values.states}
    if WANTED in {spec.name for spec in parts.decoder.inputs}:
        given[WANTED] = nodes("Sub", nodes.size(given[TOKENS], 1), 1)
    outputs = nodes.copy(parts.models[form], given, f"{form}/")
    logits = nodes("Squeeze", outputs[LOGITS], [1])  # (rows, vocabulary)
    if next(spec.dtype for spec in parts.decoder.outputs if spec.name == LOGITS) != "float32":
        logits = nodes("Cast", logits, to=TensorProto.FLOAT)
    taken = choice.take(nodes, logits, values.own, turn, room)
    own = dict(zip(values.own, taken.carried, strict=True))
    states = {s.input: _rows(nodes, outputs[s.output], taken.parents, s.batch_axis) for s in parts.states}
    return Values(own, states), taken


def _body(parts: Parts, choice: Choice, weights: Weights, memory: Mapping[str, str], room: str, before: int) -> onnx.GraphProto:
    """A turn as the loop runs it, after `before` turns outside of it."""
    nodes = Nodes("loop/", weights)
    turn, goes_on = "loop/turn", "loop/goes_on"
    dims = {
        state.input: (spec.dtype, [dim if isinstance(dim, int) else None for dim in spec.shape])
        for state in parts.states
        for spec in [parts.spec(state.input)]
    }
    kinds = {item.name: (item.dtype, item.shape) for item in choice.carried} | dims
    values = Values({item.name: f"loop/{item.name}" for item in choice.carried}, {name: f"loop/{name}" for name in dims})
    number = nodes("Add", turn, before) if before else turn
    after, taken = _turn(nodes, parts, choice, DECODER, values, memory, number, room)
    inputs = [value_info(turn, "int64", ()), value_info(goes_on, "bool", ())]
    inputs += [value_info(value, *kind) for value, kind in zip(values.all, kinds.values(), strict=True)]
    outputs = [value_info(nodes("Not", taken.all_ended), "bool", ())]
    for value, (name, kind) in zip(after.all, kinds.items(), strict=True):
        outputs.append(value_info(nodes.named(value, f"loop/next.{name}"), *kind))
    for (name, dtype), value in zip(choice.collected, taken.collected, strict=True):
        outputs.append(value_info(nodes.named(value, f"loop/each.{name}"), dtype, (None,)))
    return helper.make_graph(nodes.nodes, "turn", inputs, outputs)


def _prompt(nodes: Nodes, parts: Parts, given: str) -> tuple[str, str]:
    """The prompt with its padding in front, where no row's last token is padding, and how many tokens each row has."""
    time = nodes.size(given, 1)
    if parts.marks.pad is None:
        return given, nodes("Expand", time, nodes.size(given, 0))
    real = nodes("Not", nodes("Equal", given, parts.marks.pad))
    last = nodes("ArgMax", nodes("Cast", real, to=TensorProto.INT32), axis=1, keepdims=1, select_last_index=1)
    behind = nodes("Sub", nodes("Sub", time, 1), last)  # (batch, 1)
    index = nodes("Sub", nodes.range(time), behind)
    index = nodes("Where", nodes("Less", index, 0), nodes("Add", index, time), index)
    count = nodes("ReduceSum", nodes("Cast", real, to=TensorProto.INT64), [1], keepdims=0)
    return nodes("GatherElements", given, index, axis=1), count


def _room(nodes: Nodes, parts: Parts, used: str) -> str:
    """How many tokens each row may get, (batch)."""
    if parts.positions is None:
        return nodes("Expand", ROOM, nodes("Shape", used))
    return nodes("Min", ROOM, nodes("Sub", parts.positions, used))


def _first_states(
    nodes: Nodes, parts: Parts, begin: str, most: str, encoded: Mapping[str, str], source_rows: str | None
) -> dict[str, str]:
    rows = nodes.size(begin, 0)
    grows = parts.fixed_capacity is None and any(state.filled for state in parts.states)
    capacity = nodes("Add", nodes.size(begin, 1), most) if grows else [0]
    found = {}
    for state in parts.states:
        if state.input in encoded:
            found[state.input] = _rows(nodes, encoded[state.input], source_rows, state.batch_axis)
            continue
        spec = parts.spec(state.input)
        sizes: list[Any] = [[dim] if isinstance(dim, int) else [0] for dim in spec.shape]
        sizes[state.batch_axis] = rows
        if state.length_axis is not None and state.filled and grows:
            sizes[state.length_axis] = capacity
        shape = nodes("Concat", *sizes, axis=0)
        found[state.input] = nodes.filled(shape, state.initial, np.dtype(spec.dtype))
    return found


def _rows(nodes: Nodes, value: str, rows: str | None, axis: int) -> str:
    return value if rows is None else nodes("Gather", value, rows, axis=axis)


def _signature(parts: Parts, given: str, beams: int) -> GraphSignature:
    shape = ("batch",) if beams == 1 else ("batch", beams)
    inputs = (TensorSpec(given, "int64", ("batch", "source" if parts.has_encoder else "time")), TensorSpec(ROOM, "int64", ()))
    dtypes = {"tokens": "int64", "lengths": "int64", "score": "float32", "logprobs": "float32"}
    outputs = tuple(
        TensorSpec(name, dtypes[name], (*shape, "generated") if name in ("tokens", "logprobs") else shape) for name in OUTPUTS
    )
    return GraphSignature(inputs, outputs)


def _model(parts: Parts, nodes: Nodes, weights: Weights, signature: GraphSignature) -> onnx.ModelProto:
    inputs = [value_info(spec.name, spec.dtype, spec.shape) for spec in signature.inputs]
    outputs = [value_info(spec.name, spec.dtype, spec.shape) for spec in signature.outputs]
    graph = helper.make_graph(nodes.nodes, "generator", inputs, outputs, weights.tensors)
    models = parts.models.values()
    version = max(model.ir_version for model in models)
    return helper.make_model(graph, ir_version=version, opset_imports=joined_opsets(models), producer_name="edgekit")


def _vocabulary(signature: GraphSignature) -> int:
    logits = next((spec for spec in signature.outputs if spec.name == LOGITS), None)
    if logits is None or not isinstance(logits.shape[-1], int):
        raise OptionError("the decoder has no output 'logits' of a known vocabulary; optimize without --head to wrap it")
    return logits.shape[-1]


def _refuse_fixed(signature: GraphSignature, encoder: GraphSignature | None) -> None:
    rows, time = next(spec.shape for spec in signature.inputs if spec.name == TOKENS)
    if isinstance(rows, int):
        raise OptionError(
            f"the decoder takes {rows} rows at a time, and a loop as many as there are; export without --fix batch"
        )
    if isinstance(time, int) and (encoder is None or time > 1):
        raise OptionError(f"the decoder takes {time} tokens at a time, and the loop a whole prompt; export without --fix time")
    if encoder is not None and isinstance(source := encoder.inputs[0].shape[1], int):
        raise OptionError(f"the encoder takes sources of {source} tokens and of no other length; export without --fix source")


def _fixed_capacity(signature: GraphSignature) -> int | None:
    specs = {spec.name: spec for spec in signature.inputs}
    sizes = [specs[s.input].shape[s.length_axis] for s in signature.states if s.filled and s.length_axis is not None]
    return next((size for size in sizes if isinstance(size, int)), None)


def _source_name(parts: Parts) -> str:
    weights = {tensor.name for tensor in parts.models[ENCODER].graph.initializer}
    return next(value.name for value in parts.models[ENCODER].graph.input if value.name not in weights)
