"""A model in an application: samples of different sizes, bad input, threads, warming up and closing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import runtime
from exporters.adopt import adopt
from runtime.bundle import Bundle, write_bundle
from runtime.errors import BundleError, FeedError, OptionError
from runtime.state import initial_state, step_feeds

from ..helpers import make_model, save
from .text_networks import Shared, text_model


def of_task(bundle: Path, task: str, target: Path) -> Path:
    opened = Bundle.open(bundle)
    files: dict[str, bytes | Path] = {name: opened.root / name for name in opened.manifest.files}
    return write_bundle(target, replace(opened.manifest, task=task), files).root


@pytest.fixture
def classifier(bundle: Path, tmp_path: Path) -> runtime.Model:
    """y = xW + b, (batch, 4) → (batch, 3)."""
    return runtime.load(of_task(bundle, "classification", tmp_path / "classes.bundle"))


@pytest.fixture
def averager(tmp_path: Path) -> runtime.Model:
    """The mean of a signal of any length, (batch, time, 2) → (batch, 1)."""
    shapes: dict[str, Any] = {
        "inputs": {"x": (TensorProto.FLOAT, ["batch", "time", 2])},
        "outputs": {"y": (TensorProto.FLOAT, ["batch", 1])},
    }
    axes = {"axes": np.array([1, 2])}
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=0),
        helper.make_node("Unsqueeze", ["mean", "one"], ["y"]),
    ]
    model = make_model(nodes, axes | {"one": np.array([1])}, **shapes)
    adopted = adopt(save(model, tmp_path / "mean.onnx"), tmp_path / "mean.bundle").bundle.root
    return runtime.load(of_task(adopted, "regression", tmp_path / "values.bundle"))


# Samples of different sizes


def test_samples_of_different_lengths_are_answered_in_their_order(averager: runtime.Model) -> None:
    random = np.random.default_rng(0)
    samples = [random.standard_normal((length, 2)) for length in (3, 7, 3, 1, 7)]
    values = averager.predict(samples).values
    assert values is not None
    np.testing.assert_allclose(values, [sample.mean() for sample in samples], rtol=1e-5, atol=1e-6)
    nested = averager.predict([sample.tolist() for sample in samples]).values
    np.testing.assert_array_equal(nested, values)
    assert averager.predict(samples[1]).value == pytest.approx(samples[1].mean(), abs=1e-6)


def test_equal_sizes_run_together(averager: runtime.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session = averager.sessions["model"]
    shapes: list[tuple[int, ...]] = []
    run = session.run
    monkeypatch.setattr(session, "run", lambda feeds: (shapes.append(feeds["x"].shape), run(feeds))[1])
    averager.predict([np.ones((length, 2)) for length in (3, 7, 3, 1, 7)])
    assert sorted(shapes) == [(1, 1, 2), (2, 3, 2), (2, 7, 2)]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([np.ones((3, 2)), np.ones((3, 5))], r"sample 1 of 'x' has shape \[3, 5\]; expected \['time', 2\]"),
        ([np.ones((3, 2)), np.ones(3)], "sample 1 of 'x' has shape"),
        ([np.ones((3, 2)), np.ones((0, 2))], "sample 1 of 'x' is empty; leave it out"),
        ([np.ones((3, 2)), np.full((2, 2), np.inf)], "'sample 1 of x' has the value inf at .0, 0., which is not finite"),
        ([], "expected one sample of"),
        (np.ones((0, 3, 2)), "'x' holds no samples; expected at least one"),
        ("text", "this network does not take text; pass numbers"),
        (["a", "b"], "this network does not take text; pass numbers"),
    ],
)
def test_ragged_samples_that_do_not_fit_are_refused(averager: runtime.Model, samples: Any, message: str) -> None:
    with pytest.raises(FeedError, match=message):
        averager.predict(samples)
    assert averager.predict(np.ones((2, 2))).value == 1


# Bad input


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_in_arrays_and_by_name(classifier: runtime.Model, value: float) -> None:
    good = np.ones((2, 4), np.float32)
    before = classifier.predict(good).probabilities
    bad = good.copy()
    bad[1, 2] = value
    with pytest.raises(FeedError, match=f"'x' has the value {value} in sample 1, .* remove or fill it first"):
        classifier.predict(bad)
    with pytest.raises(FeedError, match=rf"'x' has the value {value} at \[1, 2\], .* remove or fill it first"):
        classifier.predict({"x": bad})
    np.testing.assert_array_equal(classifier.predict({"x": good}).probabilities, before)


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "input 'x' is missing; the graph takes x: float32"),
        ({"z": np.ones((1, 4), np.float32)}, "input 'x' is missing"),
        ({"x": np.ones((1, 4))}, "has dtype float64 but float32 is expected; convert it with .astype"),
        ({"x": np.ones((1, 5), np.float32)}, "axis 1 of 'x' is 5 but must be 4"),
        ({"x": np.ones(4, np.float32)}, "which has 2 axes"),
        ({"x": [[1.0, 2, 3, 4]]}, "is a list, expected a numpy array"),
        ({"x": np.ones((0, 4), np.float32)}, "'x' is empty, of shape .0, 4.; expected at least one sample"),
    ],
)
def test_feeds_by_name_are_checked(classifier: runtime.Model, feeds: Any, message: str) -> None:
    with pytest.raises(FeedError, match=message):
        classifier.predict(feeds)
    assert len(classifier.predict(np.ones((2, 4)))) == 2


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("past.0.key", (1, 3, 4, 8), "axis 1 of 'past.0.key' is 3 but must be 2"),
        ("past.0.key", (2, 2, 4, 8), "axis 0 of 'past.0.key' is 2, but 'batch' is already 1 in this run"),
        ("past.1.value", (1, 2, 9, 8), "axis 2 of 'past.1.value' is 9, but 'past' is already 3 in this run"),
        ("past.0.key", (1, 2, 4), "'past.0.key' has shape .*, which has 4 axes"),
    ],
)
def test_a_state_of_the_wrong_shape_is_refused(shared: Shared, name: str, shape: tuple[int, ...], message: str) -> None:
    model = text_model(shared, "gpt-portable")
    feeds = step_feeds(model.sessions["decoder"].signature, 1, past=3)
    before = model.run(feeds)["logits"]
    with pytest.raises(FeedError, match=message):
        model.run({**feeds, name: np.zeros(shape, np.float32)})
    np.testing.assert_array_equal(model.run(feeds)["logits"], before)


def test_a_state_for_other_rows_is_refused(shared: Shared) -> None:
    model = text_model(shared, "lstm")
    state = initial_state(model.sessions["decoder"].signature, 2)
    with pytest.raises(FeedError, match="axis 1 of 'past.hidden' is 2, but 'batch' is already 3 in this run"):
        model.run({"tokens": np.full((3, 1), 5), "wanted": np.array([0]), **state})


@pytest.mark.parametrize("content", [b"", b"not a graph", b"\x08\x0a" + b"\xff" * 40])
def test_a_graph_that_is_none_is_refused_when_it_is_loaded(bundle: Path, tmp_path: Path, content: bytes) -> None:
    opened = Bundle.open(bundle)
    files: dict[str, bytes | Path] = {name: opened.root / name for name in opened.manifest.files}
    with pytest.raises(BundleError, match=r"model\.onnx"):
        runtime.load(write_bundle(tmp_path / "x.bundle", opened.manifest, files | {"model.onnx": content}).root)


# Threads, warming up, closing


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("gpt", lambda model, text: model.score(text).token_logprobs),
        ("transformer", lambda model, text: model.score([text, "abc"], source=["ab", text])[0].token_logprobs),
        ("bert-classes", lambda model, text: model.predict([text, "a"]).probabilities.tolist()),
    ],
)
def test_eight_threads_on_one_model_give_the_serial_answers(
    shared: Shared, name: str, ask: Callable[[runtime.Model, str], Any], request: pytest.FixtureRequest
) -> None:
    model = text_model(shared, name)
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("abcdefgh"), size=random.integers(2, 14))) for _ in range(200)]
    serial = [ask(model, text) for text in texts]
    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    sys.setswitchinterval(1e-6)  # threads change places within every call, not once in many
    with ThreadPoolExecutor(8) as pool:
        parallel = list(pool.map(lambda text: ask(model, text), texts))
    assert parallel == serial


@pytest.mark.parametrize(
    "name", ["gpt", "gpt-portable", "gpt-fixed", "gpt-by-four", "lstm", "transformer", "seq2seq-attention", "bert-classes"]
)
def test_warming_up_runs_every_graph_and_a_step_of_the_decoder(
    shared: Shared, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = text_model(shared, name)
    runs: list[str] = []
    for graph, session in model.sessions.items():
        run = session.run
        monkeypatch.setattr(session, "run", lambda feeds, graph=graph, run=run: (runs.append(graph), run(feeds))[1])
    model.warmup()
    assert set(runs) == set(model.sessions)
    assert runs.count("decoder") == (2 if "decoder" in model.sessions else 0)


def test_a_closed_model_says_so(bundle: Path) -> None:
    feeds = {"x": np.ones((1, 4), np.float32)}
    with runtime.load(bundle) as model:
        assert model.run(feeds)["y"].shape == (1, 3)
    for use in (
        lambda: model.run(feeds),
        lambda: model.run(feeds, graph="other"),
        lambda: model.predict(np.ones(4)),
        lambda: model.embed("a"),
        lambda: model.score("a"),
        lambda: model.fill("a"),
        lambda: model.generate("a"),
        model.warmup,
        model.__enter__,
        lambda: model.sessions,
    ):
        with pytest.raises(OptionError, match=r"the model gemm is closed; load it again with runtime.load\(…\)"):
            use()
    model.close()
    assert runtime.load(bundle).run(feeds)["y"].shape == (1, 3)


def test_closing_also_ends_what_was_made_for_a_task(shared: Shared) -> None:
    model = text_model(shared, "gpt")
    model.score("abc")
    model.generate("abc", max_new_tokens=2)
    model.close()
    for use in (lambda: model.score("abc"), lambda: model.generate("abc"), lambda: model.stream("abc")):
        with pytest.raises(OptionError, match="the model gpt is closed"):
            use()


def test_an_error_within_the_block_closes_the_model_and_is_not_hidden(bundle: Path) -> None:
    with pytest.raises(FeedError, match="is missing"), runtime.load(bundle) as model:
        model.run({})
    with pytest.raises(OptionError, match="is closed"):
        model.run({})
