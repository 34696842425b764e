from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from exporters.rewrites.fuse_attention import REWRITE

from .graphs import check_fused, check_left_alone, graph, node, operators

HEADS, HEAD, WIDTH = 4, 2, 8
SHAPE: list[Any] = ["batch", "time", WIDTH]
IN_HEADS: list[Any] = ["batch", HEADS, "source", HEAD]
PAST: list[Any] = ["batch", HEADS, "past", HEAD]
LOW = float(np.finfo(np.float32).min)
FUSED = "com.microsoft::MultiHeadAttention"
WEIGHTS = {
    "heads": np.array([0, 0, HEADS, HEAD]),
    "joined": np.array([0, 0, WIDTH]),
    "rows": np.array([-1, WIDTH]),
    "root": 0.84,
    "scale": 0.7,
    "inverse": 1.4,
    "zero": 0.0,
    "low": LOW,
    "minus_infinity": -np.inf,
    "not_low": -10.0,
    "minus_one": np.array([-1]),
    "minus_two": np.array([-2]),
    "start": np.array([0]),
    "axes": np.array([1, 3]),
    "end": np.array([2**62]),
}


def split(name: str) -> list[onnx.NodeProto]:
    """(batch, time, width) → (batch, heads, time, head)."""
    return [
        node("Reshape", [name, "heads"], f"{name}.view"),
        node("Transpose", [f"{name}.view"], f"{name}.split", perm=[0, 2, 1, 3]),
    ]


def transposed(key: str, how: str) -> list[onnx.NodeProto]:
    """kᵀ of keys in heads, in the dialects of exporters."""
    if how == "once":
        return [node("Transpose", [key], "kt", perm=[0, 1, 3, 2])]
    if how == "from the view":
        return [node("Transpose", ["k.view"], "kt", perm=[0, 2, 3, 1])]
    return [
        node("Shape", [key], "s"),
        node("Slice", ["s", "minus_one", "end"], "s1"),
        node("Slice", ["s", "minus_two", "minus_one"], "s2"),
        node("Slice", ["s", "start", "minus_two"], "s0"),
        node("Concat", ["minus_one", "s2", "s1"], "flat", axis=0),
        node("Reshape", [key, "flat"], "k3"),
        node("Transpose", ["k3"], "k3t", perm=[0, 2, 1]),
        node("Concat", ["s0", "s1", "s2"], "full", axis=0),
        node("Reshape", ["k3t", "full"], "kt"),
    ]


def scaled(how: str) -> list[onnx.NodeProto]:
    """The scores, with the scale in its dialects."""
    if how == "both":
        parts = [node("Mul", ["q.split", "root"], "qs"), node("Mul", ["root", "kt"], "ks")]
        return [*parts, node("MatMul", ["qs", "ks"], "scores")]
    product = node("MatMul", ["q.split", "kt"], "product")
    last = node("Mul", ["product", "scale"], "scores") if how == "product" else node("Div", ["product", "inverse"], "scores")
    return [product, last]


def attention(
    *,
    transpose: str = "once",
    scale: str = "product",
    mask: list[onnx.NodeProto] | None = None,
    past: bool = False,
    cross: bool = False,
    axis: int = -1,
    guard: bool = False,
    rows: bool = False,
    opset: int = 20,
    **inputs: list[Any],
) -> onnx.ModelProto:
    """softmax(scale · q kᵀ, masked) v; `mask` makes "masked" from "scores"."""
    nodes = split("q") + ([] if cross else split("k") + split("v"))
    key, value = ("k", "v") if cross else ("k.split", "v.split")
    if past:
        nodes += [node("Concat", [f"past.{n}", f"{n}.split"], f"present.{n}", axis=2) for n in "kv"]
        key, value = "present.k", "present.v"
    nodes += transposed(key, transpose) + scaled(scale) + (mask or [])
    nodes.append(node("Softmax", ["masked" if mask else "scores"], "weights", axis=axis))
    if guard:
        nodes += [node("IsNaN", ["weights"], "nan"), node("Where", ["nan", "zero", "weights"], "guarded")]
    nodes += [
        node("MatMul", ["guarded" if guard else "weights", value], "context"),
        node("Transpose", ["context"], "back", perm=[0, 2, 1, 3]),
        node("Reshape", ["back", "rows" if rows else "joined"], "y"),
    ]
    tensors = {"q": SHAPE, "k": IN_HEADS if cross else SHAPE, "v": IN_HEADS if cross else SHAPE, **inputs}
    outputs: dict[str, list[Any]] = {"y": ["rows", WIDTH] if rows else SHAPE}
    if past:
        tensors |= {"past.k": PAST, "past.v": PAST}
        outputs |= {f"present.{n}": ["batch", HEADS, "total", HEAD] for n in "kv"}
    used = {name for item in nodes for name in item.input}
    return graph(nodes, {k: v for k, v in WEIGHTS.items() if k in used}, inputs=tensors, outputs=outputs, opset=opset)


def added(shape: list[Any]) -> dict[str, Any]:
    return {"mask": [node("Add", ["scores", "m"], "masked")], "m": shape}


def chosen(hidden: str) -> dict[str, Any]:
    nodes = [node("Greater", ["m", "zero"], "visible"), node("Where", ["visible", "scores", hidden], "masked")]
    return {"mask": nodes, "m": ["batch", 1, "time", "time"]}


@pytest.mark.parametrize("transpose", ["once", "from the view", "between reshapes"])
@pytest.mark.parametrize("scale", ["both", "product", "quotient"])
def test_every_dialect_becomes_one_node(transpose: str, scale: str) -> None:
    assert operators(check_fused(REWRITE, attention(transpose=transpose, scale=scale), 1)) == {FUSED: 1}


@pytest.mark.parametrize(
    ("shape", "expanded"),
    [(["batch", 1, "time", "time"], False), (["batch", 1, 1, "time"], True), (["time", "time"], True)],
)
def test_a_mask_that_is_added_goes_in_and_is_expanded_where_the_kernel_needs_it(shape: list[Any], expanded: bool) -> None:
    fused = operators(check_fused(REWRITE, attention(**added(shape)), 1))
    assert fused == ({"Shape": 1, "Gather": 1, "Concat": 1, "Expand": 1, FUSED: 1} if expanded else {FUSED: 1})


def test_an_old_opset_is_enough() -> None:
    fused = check_fused(REWRITE, attention(opset=13, **added(["batch", 1, 1, "time"])), 1)
    assert operators(fused)[FUSED] == 1


def test_a_mask_that_chooses_becomes_one_that_is_added() -> None:
    fused = check_fused(REWRITE, attention(**chosen("low")), 1)
    assert operators(fused) == {"Greater": 1, "Where": 1, FUSED: 1}


@pytest.mark.parametrize("transpose", ["once", "between reshapes"])
def test_a_past_goes_in_and_the_longer_keys_and_values_come_out(transpose: str) -> None:
    model = attention(transpose=transpose, past=True, **added(["batch", 1, "time", "total"]))
    fused = check_fused(REWRITE, model, 1)
    assert operators(fused) == {FUSED: 1}
    (only,) = fused.graph.node
    assert list(only.output) == ["y", "present.k", "present.v"]
    assert list(only.input[6:]) == ["past.k", "past.v"]


def test_a_mask_made_of_the_longer_keys_leaves_them_outside() -> None:
    """The fused node cannot give what it needs itself."""
    mask = [
        node("ReduceMax", ["present.k", "axes"], "largest", keepdims=1),
        node("Transpose", ["largest"], "m", perm=[0, 1, 3, 2]),
        node("Add", ["scores", "m"], "masked"),
    ]
    fused = check_fused(REWRITE, attention(past=True, mask=mask), 1)
    assert operators(fused) == {
        "Reshape": 2,
        "Transpose": 3,
        "Concat": 3,
        "ReduceMax": 1,
        "Shape": 1,
        "Gather": 1,
        "Expand": 1,
        FUSED: 1,
    }


def test_cross_attention_takes_keys_and_values_in_heads() -> None:
    mask = {"mask": [node("Add", ["scores", "m"], "masked")], "m": ["batch", 1, "time", "source"]}
    fused = check_fused(REWRITE, attention(cross=True, **mask), 1)
    assert operators(fused) == {FUSED: 1}
    assert list(fused.graph.node[0].input) == ["q", "k", "v", "", "", "m"]


def test_heads_joined_to_rows_stay_rows() -> None:
    assert operators(check_fused(REWRITE, attention(rows=True), 1)) == {FUSED: 1, "Reshape": 1}


def test_a_guard_against_nan_goes_where_nan_cannot_come() -> None:
    assert operators(check_fused(REWRITE, attention(guard=True), 1)) == {FUSED: 1}
    assert operators(check_fused(REWRITE, attention(guard=True, **chosen("low")), 1))[FUSED] == 1


def test_a_guard_against_nan_stays_where_nan_can_come() -> None:
    reason = "the weights are guarded against NaN, which the mask may cause"
    check_left_alone(REWRITE, attention(guard=True, **chosen("minus_infinity")), reason)
    check_left_alone(REWRITE, attention(guard=True, **added(["batch", 1, "time", "time"])), reason)


def test_a_mask_that_is_the_same_for_all_keys_is_left_alone() -> None:
    reason = "the mask is the same for all keys, which the kernel does not broadcast"
    check_left_alone(REWRITE, attention(**added(["batch", 1, "time", 1])), reason)


def test_a_softmax_over_another_axis_is_something_else() -> None:
    check_left_alone(REWRITE, attention(axis=2), "the softmax is not over the keys")


def test_a_mask_that_chooses_a_number_that_counts_is_left_alone() -> None:
    reason = "the mask puts a number in place of hidden scores that is not low enough to be added instead"
    check_left_alone(REWRITE, attention(**chosen("not_low")), reason)


def test_queries_that_were_changed_after_they_were_split_are_left_alone() -> None:
    model = attention()
    for item in model.graph.node:
        if item.op_type == "MatMul" and item.input[0] == "q.split":
            item.input[0] = "rotated"
    model.graph.node.insert(2, node("Neg", ["q.split"], "rotated"))
    check_left_alone(REWRITE, model, "the queries are not heads of one (batch, time, width) tensor")


def test_keys_in_another_order_of_axes_are_something_else() -> None:
    model = attention()
    next(item for item in model.graph.node if item.output[0] == "kt").attribute[0].ints[:] = [0, 3, 1, 2]
    del model.graph.value_info[:]
    check_left_alone(REWRITE, model)


def test_heads_that_are_not_joined_are_left_alone() -> None:
    model = attention()
    del model.graph.node[-1]
    model.graph.node[-1].output[0] = "y"
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", 1, ["batch", "time", HEADS, HEAD]))
    check_left_alone(REWRITE, model, "the heads are not joined by a Reshape after the last Transpose")
