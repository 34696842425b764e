from __future__ import annotations

import numpy as np
import onnx
import pytest

from exporters.rewrites.fuse_bias_gelu import REWRITE

from .graphs import check_fused, check_left_alone, graph, node, normal, operators


def biased(bias: np.ndarray, approximate: str = "none") -> onnx.ModelProto:
    nodes = [node("Add", ["b", "x"], "sum"), node("Gelu", ["sum"], "y", approximate=approximate)]
    return graph(nodes, {"b": bias})


@pytest.mark.parametrize(("approximate", "operator"), [("none", "BiasGelu"), ("tanh", "FastGelu")])
def test_the_bias_goes_into_the_activation(approximate: str, operator: str) -> None:
    fused = check_fused(REWRITE, biased(normal(8), approximate), 1)
    assert operators(fused) == {f"com.microsoft::{operator}": 1}
    assert {item.domain: item.version for item in fused.opset_import}["com.microsoft"] == 1


def test_a_bias_that_is_no_vector_is_left_alone() -> None:
    check_left_alone(REWRITE, biased(normal(1, 1, 8)))


def test_a_bias_of_one_element_is_left_alone() -> None:
    check_left_alone(REWRITE, biased(normal(1)), "the bias is not as long as the last axis, or that axis is not known")


def test_a_sum_that_is_used_elsewhere_is_left_alone() -> None:
    model = biased(normal(8))
    model.graph.output.append(onnx.helper.make_tensor_value_info("sum", 1, ["batch", "time", 8]))
    check_left_alone(REWRITE, model, "the sum with the bias is used elsewhere too")
