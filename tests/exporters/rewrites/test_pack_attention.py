from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from exporters.rewrites.engine import apply
from exporters.rewrites.pack_attention import REWRITE
from runtime.session import Session

from ...helpers import make_model
from .graphs import node, operators

HEADS, HEAD = 2, 8
WIDTH = HEADS * HEAD


def split_attention(*, sizes: tuple[int, ...] = (WIDTH, WIDTH, WIDTH), swapped: bool = False) -> onnx.ModelProto:
    names = ["q", "k", "v"]
    taken = ["k", "q", "v"] if swapped else names
    cache = ["batch", HEADS, "capacity", HEAD]
    attention = helper.make_node(
        "GroupQueryAttention",
        [*taken, "past_k", "past_v", "last", "total"],
        ["y", "present_k", "present_v"],
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=HEADS,
    )
    model = make_model(
        [node("Split", ["x", "sizes"], names, axis=-1), attention],
        {"sizes": np.array(sizes)},
        inputs={
            "x": (TensorProto.FLOAT, ["batch", "time", 3 * WIDTH]),
            "past_k": (TensorProto.FLOAT, cache),
            "past_v": (TensorProto.FLOAT, cache),
            "last": (TensorProto.INT32, ["batch"]),
            "total": (TensorProto.INT32, []),
        },
        outputs={
            "y": (TensorProto.FLOAT, ["batch", "time", WIDTH]),
            "present_k": (TensorProto.FLOAT, cache),
            "present_v": (TensorProto.FLOAT, cache),
        },
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def run(model: onnx.ModelProto, batch: int, time: int, past: int) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    from exporters.graph import signature_of

    random = np.random.default_rng(0)
    cache = (batch, HEADS, past + time, HEAD)
    feeds = {
        "x": random.standard_normal((batch, time, 3 * WIDTH)).astype(np.float32),
        "past_k": random.standard_normal(cache).astype(np.float32),
        "past_v": random.standard_normal(cache).astype(np.float32),
        "last": np.full(batch, past + time - 1, np.int32),
        "total": np.array(past + time, np.int32),
    }
    return Session(model.SerializeToString(), signature_of(model), device="cpu").run(feeds)


def test_the_split_goes_and_the_numbers_stay() -> None:
    model = split_attention()
    packed = apply(REWRITE, model)
    assert packed.matches == 1
    assert operators(packed.model) == {"com.microsoft::GroupQueryAttention": 1}
    for sizes in ((2, 5, 0), (3, 1, 4)):
        before, after = run(model, *sizes), run(packed.model, *sizes)
        for name, values in before.items():
            np.testing.assert_allclose(after[name], values, atol=1e-6)


def test_parts_in_another_order_are_left_alone() -> None:
    assert apply(REWRITE, split_attention(swapped=True)).matches == 0


def test_parts_of_other_sizes_are_refused_with_the_reason() -> None:
    refused = apply(REWRITE, split_attention(sizes=(WIDTH, WIDTH // 2, WIDTH)))
    assert refused.matches == 0
    assert refused.refusals == ("the parts of the Split do not have the sizes of query, key and value",)


def test_a_part_that_is_used_elsewhere_too_keeps_the_split() -> None:
    model = split_attention()
    model.graph.output.append(helper.make_tensor_value_info("q", TensorProto.FLOAT, ["batch", "time", WIDTH]))
    assert apply(REWRITE, model).matches == 0
