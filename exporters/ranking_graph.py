"""The graph with which `runtime` ranks tokens: python -m exporters.ranking_graph

logits (rows, vocabulary), count (1) → tokens, logprobs (rows, count), the likeliest first, of equals the smaller number first.

It is the same for every bundle and lies in runtime/generation/ranking.onnx, because `runtime` has nothing to make graphs with.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

import runtime.generation

PATH = Path(runtime.generation.__file__).with_name("ranking.onnx")


def ranking_graph() -> onnx.ModelProto:
    nodes = [
        helper.make_node("TopK", ["logits", "count"], ["largest", "tokens"], axis=-1),
        helper.make_node("LogSoftmax", ["logits"], ["all"], axis=-1),
        helper.make_node("GatherElements", ["all", "tokens"], ["logprobs"], axis=-1),
    ]
    inputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", "vocabulary"]),
        helper.make_tensor_value_info("count", TensorProto.INT64, [1]),
    ]
    outputs = [
        helper.make_tensor_value_info("logprobs", TensorProto.FLOAT, ["rows", "kept"]),
        helper.make_tensor_value_info("tokens", TensorProto.INT64, ["rows", "kept"]),
    ]
    graph = helper.make_graph(nodes, "ranking", inputs, outputs)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)], producer_name="edgekit")


if __name__ == "__main__":
    PATH.write_bytes(ranking_graph().SerializeToString())
