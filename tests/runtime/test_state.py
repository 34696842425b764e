"""States of decoders: what a step carries, without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from runtime.errors import FeedError
from runtime.session import Session
from runtime.signature import GraphSignature, StateSpec, TensorSpec, bind_sizes
from runtime.state import initial_state, reorder, specified, step, step_feeds

from ..helpers import make_model

GROWING = GraphSignature(
    (TensorSpec("tokens", "int64", ("batch", "time")), TensorSpec("past.0.key", "float32", ("batch", 2, "past", 4))),
    (
        TensorSpec("logits", "float32", ("batch", "time", 9)),
        TensorSpec("present.0.key", "float32", ("batch", 2, "past + time", 4)),
    ),
    (StateSpec("past.0.key", "present.0.key", batch_axis=0, length_axis=2),),
)
IN_PLACE = GraphSignature(
    (
        TensorSpec("tokens", "int64", ("batch", "time")),
        TensorSpec("past.length", "int32", ("batch",)),
        TensorSpec("past.0.key", "float32", ("batch", 2, "capacity", 4)),
    ),
    (TensorSpec("present.length", "int32", ("batch",)), TensorSpec("present.0.key", "float32", ("batch", 2, "capacity", 4))),
    (
        StateSpec("past.length", "present.length", batch_axis=0),
        StateSpec("past.0.key", "present.0.key", batch_axis=0, length_axis=2, filled="present.length"),
    ),
)
HIDDEN = GraphSignature(
    (TensorSpec("tokens", "int64", ("batch", 1)), TensorSpec("past.hidden", "float32", (1, "batch", 3))),
    (TensorSpec("logits", "float32", ("batch", 1, 3)), TensorSpec("present.hidden", "float32", (1, "batch", 3))),
    (StateSpec("past.hidden", "present.hidden", batch_axis=1),),
)


def counting_session() -> Session:
    """A decoder of one token at a time: the hidden state is the sum of all tokens so far, and the logits are that sum."""
    nodes = [
        helper.make_node("Cast", ["tokens"], ["t"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["t", "shape"], ["column"]),
        helper.make_node("Add", ["past.hidden", "column"], ["present.hidden"]),
        helper.make_node("Transpose", ["present.hidden"], ["logits"], perm=[1, 0, 2]),
    ]
    model: onnx.ModelProto = make_model(
        nodes,
        {"shape": np.array([1, -1, 1])},
        inputs={"tokens": (TensorProto.INT64, ["batch", 1]), "past.hidden": (TensorProto.FLOAT, [1, "batch", 3])},
        outputs={"logits": (TensorProto.FLOAT, ["batch", 1, 3]), "present.hidden": (TensorProto.FLOAT, [1, "batch", 3])},
    )
    return Session(model.SerializeToString(), HIDDEN, device="cpu")


def test_a_cache_that_grows_starts_empty_and_one_in_place_at_its_capacity() -> None:
    assert initial_state(GROWING, 3)["past.0.key"].shape == (3, 2, 0, 4)
    state = initial_state(IN_PLACE, 3, capacity=7)
    assert state["past.0.key"].shape == (3, 2, 7, 4)
    assert state["past.length"].tolist() == [0, 0, 0]


def test_an_encoders_output_of_a_states_name_is_its_first_value() -> None:
    given = np.ones((1, 2, 3), np.float32)
    assert initial_state(HIDDEN, 2, given={"past.hidden": given})["past.hidden"] is given


def test_several_tokens_are_given_one_after_the_other_to_a_graph_that_takes_one() -> None:
    session = counting_session()
    logits, state = step(session, np.array([[1, 2, 3], [10, 20, 30]]), initial_state(HIDDEN, 2))
    assert logits[:, :, 0].tolist() == [[1, 3, 6], [10, 30, 60]]
    assert state["past.hidden"][0, :, 0].tolist() == [6, 60]


def test_rows_are_reordered_along_the_batch_axis_of_each_state() -> None:
    session = counting_session()
    _, state = step(session, np.array([[1], [2], [3]]), initial_state(HIDDEN, 3))
    logits, _ = step(session, np.array([[0], [0]]), reorder(HIDDEN, state, [2, 0]))
    assert logits[:, 0, 0].tolist() == [3, 1]


def test_a_missing_memory_is_named() -> None:
    needs = GraphSignature((*HIDDEN.inputs, TensorSpec("memory.key", "float32", ("batch",))), HIDDEN.outputs, HIDDEN.states)
    session = counting_session()
    session.signature = needs
    with pytest.raises(FeedError, match="the decoder needs 'memory.key', which the encoder gives; run the encoder first"):
        step(session, np.array([[1]]), initial_state(needs, 1))


def test_what_lies_beyond_the_filled_part_of_a_cache_does_not_count() -> None:
    outputs = {"present.length": np.array([1, 3], np.int32), "present.0.key": np.ones((2, 2, 4, 4), np.float32)}
    cleaned = specified(IN_PLACE.states, outputs)["present.0.key"]
    assert cleaned[0, 0, :, 0].tolist() == [1, 0, 0, 0]
    assert cleaned[1, 0, :, 0].tolist() == [1, 1, 1, 0]
    assert specified(GROWING.states, {"present.0.key": outputs["present.0.key"]})["present.0.key"].all()


@pytest.mark.parametrize("signature", [GROWING, IN_PLACE, HIDDEN])
def test_a_step_to_be_timed_has_one_token_after_the_past(signature: GraphSignature) -> None:
    feeds = step_feeds(signature, 2, past=5)
    sizes = signature.check_feeds(feeds)
    assert feeds["tokens"].shape == (2, 1)
    assert sizes.get("past", 5) == 5
    if "past.length" in feeds:
        assert feeds["past.length"].tolist() == [5, 5]
        assert sizes["capacity"] > 5


def test_a_size_that_is_declared_as_a_sum_is_checked() -> None:
    sizes = {"past": 3, "time": 2}
    bind_sizes(GROWING.outputs[1], np.zeros((1, 2, 5, 4), np.float32), sizes)
    with pytest.raises(FeedError, match="axis 2 of 'present.0.key' is 6 but must be past \\+ time, which is 5 in this run"):
        bind_sizes(GROWING.outputs[1], np.zeros((1, 2, 6, 4), np.float32), sizes)


def test_a_state_whose_filling_no_output_tells_is_refused() -> None:
    with pytest.raises(FeedError, match="names a tensor the graph does not have"):
        GraphSignature(GROWING.inputs, GROWING.outputs, (StateSpec("past.0.key", "present.0.key", 0, 2, filled="length"),))


def test_a_bound_step_writes_its_cache_in_place(tmp_path: Path) -> None:
    """ScatterElements stands for the kernel: it writes the token at the row's length."""
    nodes = [
        helper.make_node("Cast", ["tokens"], ["t"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["past.length"], ["at"], to=TensorProto.INT64),
        helper.make_node("Unsqueeze", ["at", "one"], ["index"]),
        helper.make_node("ScatterElements", ["past.0.key", "index", "t"], ["present.0.key"], axis=1),
        helper.make_node("Add", ["past.length", "step"], ["present.length"]),
        helper.make_node("Identity", ["t"], ["logits"]),
    ]
    cache = ["batch", "capacity"]
    model = make_model(
        nodes,
        {"one": np.array([1]), "step": np.array(1, np.int32)},
        inputs={
            "tokens": (TensorProto.INT64, ["batch", 1]),
            "past.length": (TensorProto.INT32, ["batch"]),
            "past.0.key": (TensorProto.FLOAT, cache),
        },
        outputs={
            "logits": (TensorProto.FLOAT, ["batch", 1]),
            "present.length": (TensorProto.INT32, ["batch"]),
            "present.0.key": (TensorProto.FLOAT, cache),
        },
    )
    signature = GraphSignature(
        (
            TensorSpec("tokens", "int64", ("batch", 1)),
            TensorSpec("past.length", "int32", ("batch",)),
            TensorSpec("past.0.key", "float32", ("batch", "capacity")),
        ),
        (
            TensorSpec("logits", "float32", ("batch", 1)),
            TensorSpec("present.length", "int32", ("batch",)),
            TensorSpec("present.0.key", "float32", ("batch", "capacity")),
        ),
        (
            StateSpec("past.length", "present.length", 0),
            StateSpec("past.0.key", "present.0.key", 0, 1, filled="present.length"),
        ),
    )
    session = Session(model.SerializeToString(), signature, device="cpu")
    feeds = step_feeds(signature, 1, past=2)
    call = session.bind(feeds)
    call()
    call()
    with pytest.raises(FeedError, match="input 'tokens' is missing"):
        session.bind({})
