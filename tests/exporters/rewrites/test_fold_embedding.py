from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from exporters.rewrites.fold_embedding import REWRITE

from .graphs import check_fused, check_left_alone, graph, node, normal, operators


def embedded(rows: int = 7, *, bias: bool = True, axis: int = 0) -> onnx.ModelProto:
    """Tokens, which are made of the input, → rows of a table → product."""
    nodes = [
        node("Cast", ["x"], "positive", to=TensorProto.INT64),
        node("Mod", ["positive", "seven"], "tokens"),
        node("Gather", ["table", "tokens"], "rows", axis=axis),
        node("MatMul", ["rows", "w"], "product" if bias else "y"),
        *([node("Add", ["product", "b"], "y")] if bias else []),
    ]
    weights = {"table": normal(rows, 8), "w": normal(8, 5), "b": normal(5), "seven": np.array(7)}
    return graph(nodes, weights, inputs={"x": ["batch", "time"]}, outputs={"y": ["batch", "time", 5]})


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_of_a_small_tables_rows_becomes_a_table(bias: bool) -> None:
    assert operators(check_fused(REWRITE, embedded(bias=bias), 1)) == {"Cast": 1, "Mod": 1, "Gather": 1}


def test_a_table_with_more_rows_than_the_product_has_inputs_is_left_alone() -> None:
    check_left_alone(REWRITE, embedded(rows=9), "the table has 9 rows and the product 8 inputs, so that it would grow")


def test_a_weight_that_is_used_elsewhere_is_left_alone() -> None:
    model = embedded()
    model.graph.node.append(node("MatMul", ["rows", "w"], "again"))
    model.graph.output.append(helper.make_tensor_value_info("again", TensorProto.FLOAT, ["batch", "time", 5]))
    check_left_alone(REWRITE, model, "the weight is used elsewhere too (2 places)")
