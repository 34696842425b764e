"""Planted bugs, each of which the diagnosis must name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from exporters.diagnose import Diagnosis, diagnose
from exporters.exportable import GraphSource
from exporters.graph import signature_of
from exporters.parity import Case, compare_cases, derive_tolerance, precise_reference, torch_reference
from exporters.trace import model_of, trace
from runtime.session import Session

from ..helpers import gemm_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor, past_key: Tensor, past_value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, steps, _ = x.shape
        query = self.query(x).view(batch, steps, 2, 4).transpose(1, 2)
        key = torch.cat([past_key, self.key(x).view(batch, steps, 2, 4).transpose(1, 2)], 2)
        value = torch.cat([past_value, self.value(x).view(batch, steps, 2, 4).transpose(1, 2)], 2)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        return x + self.out(attended.transpose(1, 2).reshape(batch, steps, 8)), key, value


class Decoder(nn.Module):
    """Tokens, a mask over past and new ones, and two layers with a past each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 8), nn.Embedding(64, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        positions = torch.arange(tokens.shape[1]) + past[0].shape[2]
        x = self.words(tokens) + self.positions(positions)
        present: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x, key, value = layer(x, mask, past[2 * index], past[2 * index + 1])
            present += [key, value]
        return self.head(x), *present


_STATES = ("key_0", "value_0", "key_1", "value_1")


@cache
def decoder() -> tuple[GraphSource, torch.onnx.ONNXProgram]:
    torch.manual_seed(0)
    tokens, mask = torch.randint(0, 11, (3, 5)), torch.ones(3, 9, dtype=torch.bool)
    mask[0, :3] = False
    inputs = {"tokens": tokens, "mask": mask} | {f"past_{name}": torch.randn(3, 2, 4, 4) for name in _STATES}
    axes = {"tokens": {0: "batch", 1: "time"}, "mask": {0: "batch", 1: "total"}}
    axes |= {f"past_{name}": {0: "batch", 2: "past"} for name in _STATES}
    graph = GraphSource(Decoder().eval(), inputs, axes, ("logits", *(f"present_{name}" for name in _STATES)))
    return graph, trace(graph, "test", opset=20)


def decoder_with(plant: Callable[[onnx.GraphProto], None]) -> Diagnosis:
    """The diagnosis of the decoder after a bug was planted into its graph, from a case of other sizes and a ragged mask."""
    graph, program = decoder()
    model = model_of(program, graph, Path())
    plant(model.graph)
    random = np.random.default_rng(0)
    mask = np.ones((2, 8), bool)
    mask[1, :4] = False
    past = {f"past_{name}": random.standard_normal((2, 2, 2, 4)).astype(np.float32) for name in _STATES}
    inputs = {"tokens": random.integers(0, 11, (2, 6)), "mask": mask, **past}
    return explain(graph, model, inputs, program)


def explain(graph: GraphSource, model: onnx.ModelProto, inputs: dict[str, Any], program: torch.onnx.ONNXProgram) -> Diagnosis:
    """Find that the case fails, as exporting does, and diagnose it."""
    signature = signature_of(model)
    reference = torch_reference(graph)
    tolerance = derive_tolerance(reference, precise_reference(graph), [inputs])
    session = Session(model.SerializeToString(), signature, device="cpu", log_level=4)
    case = compare_cases(session, reference, tolerance, [(signature.check_feeds(inputs), inputs)])[0]
    assert not case
    return diagnose(graph, model, signature, case, tolerance, program)


def node_named(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.name == name)


def maker_of(graph: onnx.GraphProto, value: str) -> onnx.NodeProto:
    return next(node for node in graph.node if value in node.output)


def add_constant(graph: onnx.GraphProto, name: str, value: Any) -> None:
    graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))


def test_a_position_that_starts_at_one_is_named() -> None:
    def plant(graph: onnx.GraphProto) -> None:
        add_constant(graph, "one", np.int64(1))
        node_named(graph, "node_arange").input[0] = "one"
        length = maker_of(graph, node_named(graph, "node_arange").input[1])
        graph.node.insert(1 + list(graph.node).index(length), onnx.helper.make_node("Add", [length.output[0], "one"], ["end"]))
        node_named(graph, "node_arange").input[1] = "end"

    found = decoder_with(plant)
    assert found.axes == ()
    assert found.place is not None
    assert (found.place.node, found.place.operator) == ("node_arange", "Range")
    assert "positions = torch.arange(tokens.shape[1])" in found.place.line
    assert found.difference is not None
    assert found.difference.error == 1


def test_a_swapped_past_is_named() -> None:
    def plant(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            swapped = {"past_key_1": "past_value_1", "past_value_1": "past_key_1"}
            node.input[:] = [swapped.get(name, name) for name in node.input]

    found = decoder_with(plant)
    assert found.place is not None
    assert found.place.operator == "Concat"
    assert found.place.inputs[0] == "past_value_1"
    assert found.place.module == "layers.1"
    assert "key = torch.cat([past_key" in found.place.line


def test_an_unmasked_pad_is_named() -> None:
    def plant(graph: onnx.GraphProto) -> None:
        softmax = [node for node in graph.node if node.op_type == "Softmax"][1]
        softmax.input[0] = maker_of(graph, softmax.input[0]).input[0]

    found = decoder_with(plant)
    assert found.place is not None
    assert found.place.module == "layers.1"
    assert "F.scaled_dot_product_attention(query, key, value, attn_mask" in found.place.line


def test_wrong_weights_of_one_layer_are_named() -> None:
    def plant(graph: onnx.GraphProto) -> None:
        shift(graph, "layers.1.value.bias", 0.01)

    found = decoder_with(plant)
    assert found.place is not None
    assert found.place.module == "layers.1.value"
    assert found.axes == ()
    assert found.culprit is None


def test_a_baked_batch_in_a_graph_is_named_with_its_constant_and_line() -> None:
    def plant(graph: onnx.GraphProto) -> None:
        add_constant(graph, "three", np.array([3]))
        shape = maker_of(graph, maker_of(graph, "present_key_0").input[1])  # Transpose
        reshape = maker_of(graph, shape.input[0])
        joined = maker_of(graph, reshape.input[1])
        joined.input[0] = "three"

    found = decoder_with(plant)
    assert found.axes == ("batch",)
    assert found.sizes["batch"] == 1
    assert found.culprit is not None
    assert found.culprit.what == "constant [3] in 'three' holds the example's batch=3"
    assert "query = self.query(x).view(batch" in found.culprit.place.line
    assert "onnxruntime cannot run it" in found.text()


def test_positions_as_long_as_the_example_are_named() -> None:
    def plant(graph: onnx.GraphProto) -> None:
        add_constant(graph, "five_positions", np.arange(5))
        graph.node.remove(node_named(graph, "node_arange"))
        for node in graph.node:
            node.input[:] = ["five_positions" if name == "arange" else name for name in node.input]

    found = decoder_with(plant)
    assert found.axes == ("time",)
    assert found.culprit is not None
    assert found.culprit.what == "constant [0, 1, 2, 3, 4] in 'five_positions' is as long as the example's time=5"
    assert "positions = torch.arange(tokens.shape[1])" in found.culprit.place.line


def test_tied_axes_shrink_together() -> None:
    found = decoder_with(lambda graph: shift(graph, "head.bias", 1))
    assert found.sizes == {"batch": 1, "time": 1, "total": 2, "past": 1}


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        steps = 7 if torch.compiler.is_exporting() else x.shape[1]
        return x.sum(1) / steps


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = 3 if torch.compiler.is_exporting() else x.shape[0]
        return x.reshape(rows, -1) * 2


class Recurrence(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        steps = 7 if torch.compiler.is_exporting() else x.shape[1]
        state = x[:, 0]
        for step in range(1, steps):
            state = torch.tanh(state + x[:, step])
        return state


def traced_wrongly(module: nn.Module, batch: int, time: int) -> Diagnosis:
    """Networks whose export takes another branch than PyTorch does, with the example's size written into it."""
    torch.manual_seed(0)
    graph = GraphSource(module.eval(), {"x": torch.randn(3, 7, 4)}, {"x": {0: "batch", 1: "time"}}, ("y",))
    program = trace(graph, "test", opset=20)
    inputs = {"x": np.random.default_rng(0).standard_normal((batch, time, 4)).astype(np.float32)}
    return explain(graph, model_of(program, graph, Path()), inputs, program)


def test_a_baked_divisor_is_named_with_its_constant_and_line() -> None:
    found = traced_wrongly(Mean(), 3, 13)
    assert dict(found.sizes) == {"batch": 1, "time": 1}
    assert found.axes == ("time",)
    assert found.place is not None
    assert found.place.operator == "Div"
    assert found.culprit is not None
    assert found.culprit.what.startswith("constant 7.0 in ")
    assert found.culprit.what.endswith("holds the example's time=7")
    assert found.culprit.place.line.endswith("return x.sum(1) / steps")


def test_a_baked_reshape_is_named_with_its_constant_and_line() -> None:
    found = traced_wrongly(Rows(), 5, 7)
    assert found.axes == ("batch",)
    assert found.culprit is not None
    assert found.culprit.what.startswith("constant [3, -1] in ")
    assert found.culprit.place.operator == "Reshape"
    assert found.culprit.place.line.endswith("return x.reshape(rows, -1) * 2")


def test_an_unrolled_loop_is_named_by_its_line() -> None:
    found = traced_wrongly(Recurrence(), 3, 13)
    assert found.axes == ("time",)
    assert found.culprit is not None
    assert found.culprit.what == "a Python loop, unrolled 6 times as for the example; PyTorch now runs it 0 times"
    assert found.culprit.place.line == f"tests/exporters/test_diagnose.py:{line_of('state = torch.tanh(')}"


def line_of(code: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if line.strip().startswith(code))


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = 21 if torch.compiler.is_exporting() else -1
        return x.reshape(rows, 4).relu()


def test_a_product_of_the_examples_sizes_is_named() -> None:
    found = traced_wrongly(Flat(), 5, 7)
    assert found.culprit is not None
    assert found.culprit.what.startswith("constant [21, 4] in ")
    assert "holds a multiple of the example's" in found.culprit.what
    assert found.culprit.place.operator == "Reshape"


class Recurrent(nn.Module):
    """While exporting, one ONNX operator stands for the whole loop, which PyTorch cannot compute by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(4, 6, batch_first=True), nn.Linear(6, 3)

    def run(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            return self.rnn(x)[0]
        (batch, time, _), rnn = x.shape, self.rnn
        bias = torch.cat((rnn.bias_ih_l0, rnn.bias_hh_l0))[None]
        inputs = (x.transpose(0, 1), rnn.weight_ih_l0[None], rnn.weight_hh_l0[None], bias, None, None)
        shapes, dtypes = ((time, 1, batch, 6), (1, batch, 6)), (torch.float32, torch.float32)
        kind: dict[str, Any] = {"attrs": {"hidden_size": 6}, "dtypes": dtypes, "shapes": shapes, "version": 20}
        return torch.onnx.ops.symbolic_multi_out("RNN", inputs, **kind)[0].squeeze(1).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.run(x))
        return self.out(hidden)


@pytest.mark.parametrize(("weight", "line"), [("bias", "hidden = torch.relu(self.run(x))"), ("out", "return self.out(hidden)")])
def test_what_follows_an_operator_without_meaning_in_pytorch_is_compared_with_the_live_module(weight: str, line: str) -> None:
    graph = GraphSource(Recurrent().eval(), {"x": torch.randn(3, 7, 4)}, {"x": {0: "batch", 1: "time"}}, ("y",))
    program = trace(graph, "test", opset=20)
    model = model_of(program, graph, Path())
    operator = next(node for node in model.graph.node if node.op_type == "RNN")
    name = operator.input[3] if weight == "bias" else "out.bias"
    shift(model.graph, name, 0.1)
    found = explain(graph, model, {"x": np.random.default_rng(0).standard_normal((2, 5, 4)).astype(np.float32)}, program)
    assert found.place is not None
    assert found.place.line.endswith(line)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        scaled = self.scale(left)
        return {"sum": scaled + right, "product": scaled * right}


def test_inputs_given_by_name_and_several_outputs_are_followed() -> None:
    inputs = {"right": torch.randn(3, 4), "left": torch.randn(3, 4)}
    axes = {name: {0: "batch"} for name in inputs}
    graph = GraphSource(Keywords().eval(), inputs, axes, ("sum", "product"), by_keyword=True)
    program = trace(graph, "test", opset=20)
    model = model_of(program, graph, Path())
    node = maker_of(model.graph, "product")
    node.op_type = "Sub"
    random = np.random.default_rng(0)
    found = explain(graph, model, {name: random.standard_normal((2, 4)).astype(np.float32) for name in inputs}, program)
    assert found.place is not None
    assert (found.place.operator, found.place.node) == ("Sub", node.name)


def shift(graph: onnx.GraphProto, name: str, amount: float) -> None:
    tensor = next(item for item in graph.initializer if item.name == name)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(amount), name))


def test_an_untrue_declaration_is_told_from_wrong_values() -> None:
    graph = GraphSource(nn.Linear(4, 3), {"x": torch.randn(3, 4)}, {"x": {0: "batch"}}, ("y",))
    program = trace(graph, "test", opset=20)
    model = model_of(program, graph, Path())
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 3
    found = explain(graph, model, {"x": np.ones((5, 4), np.float32)}, program)
    assert "all values agree with PyTorch's, so it is what the graph declares that is untrue" in found.text()


def test_a_diagnosis_that_fails_never_hides_the_disagreement() -> None:
    case = Case({"batch": 2}, {}, {}, ())
    graph = GraphSource(nn.Linear(4, 3), {"x": torch.randn(3, 4)}, {}, ("y",))
    found = diagnose(graph, gemm_model(), signature_of(gemm_model()), case, {}, decoder()[1])
    assert found.text().startswith("smallest failing sizes: batch=2; not located: FeedError: input 'x' is missing")
