from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import runtime
from exporters.adopt import adopt
from exporters.heads import Head
from exporters.optimize import optimize
from runtime.bundle import MANIFEST, Bundle, write_bundle
from runtime.errors import OptionError, ParityRefused
from runtime.verify import verify_bundle

from ..helpers import make_model, save

VOCABULARY = 9


def logits_bundle(folder: Path, *, weights: np.ndarray | None = None, output: str = "logits", time: bool = True) -> Bundle:
    """Logits (batch, time, 9) or (batch, 9), and a second output that a head leaves alone."""
    matrix = np.random.default_rng(0).standard_normal((4, VOCABULARY)) * 3 if weights is None else weights
    middle = ["time"] if time else []
    model = make_model(
        [helper.make_node("MatMul", ["x", "w"], [output]), helper.make_node("Neg", ["x"], ["other"])],
        {"w": matrix.astype(np.float32)},
        inputs={"x": (TensorProto.FLOAT, ["batch", *middle, 4])},
        outputs={
            output: (TensorProto.FLOAT, ["batch", *middle, VOCABULARY]),
            "other": (TensorProto.FLOAT, ["batch", *middle, 4]),
        },
    )
    return adopt(save(model, folder / "m.onnx"), folder / "m.bundle").bundle


def test_the_argmax_leaves_the_graph_instead_of_the_logits(tmp_path: Path) -> None:
    bundle = logits_bundle(tmp_path)
    report = optimize(bundle, tmp_path / "out.bundle", head=Head())
    assert report.changed
    assert report.head == "argmax"
    after = Bundle.open(tmp_path / "out.bundle")
    assert [str(spec) for spec in after.graph()[1].signature.outputs] == [
        "token: int64[batch, time]",
        "other: float32[batch, time, 4]",
    ]
    x = np.random.default_rng(5).standard_normal((3, 6, 4)).astype(np.float32)
    logits = runtime.load(bundle.root).run({"x": x})["logits"]
    np.testing.assert_array_equal(runtime.load(after.root).run({"x": x})["token"], logits.argmax(-1))
    assert verify_bundle(after.root)
    assert after.manifest.lineage[-1]["head"] == "argmax"


@pytest.mark.parametrize("time", [True, False])
def test_the_likeliest_tokens_come_sorted_with_their_log_probabilities(time: bool, tmp_path: Path) -> None:
    bundle = logits_bundle(tmp_path, time=time)
    optimize(bundle, tmp_path / "out.bundle", head=Head(3))
    x = np.random.default_rng(5).standard_normal((3, 6, 4) if time else (3, 4)).astype(np.float32)
    logits = runtime.load(bundle.root).run({"x": x})["logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    answer = runtime.load(tmp_path / "out.bundle").run({"x": x})
    order = np.argsort(-logits, axis=-1)[..., :3]
    np.testing.assert_array_equal(answer["top.tokens"], order)
    np.testing.assert_allclose(answer["top.logprobs"], np.take_along_axis(logprobs, order, -1), rtol=1e-5, atol=1e-5)
    manifest = Bundle.open(tmp_path / "out.bundle").manifest
    assert set(manifest.tolerance["model"]) == {"top.logprobs", "top.tokens", "other"}
    assert manifest.tolerance["model"]["top.tokens"].allowed == 0.0
    before = bundle.manifest.tolerance["model"]["logits"].allowed
    assert 2 * before <= manifest.tolerance["model"]["top.logprobs"].allowed < 4 * before


def test_goldens_are_recomputed_and_a_wrong_token_fails_them(tmp_path: Path) -> None:
    optimize(logits_bundle(tmp_path), tmp_path / "out.bundle", head=Head())
    bundle = Bundle.open(tmp_path / "out.bundle")
    expected = [outputs["token"] for _, _, outputs in bundle.goldens()]
    assert expected
    assert all(tokens.dtype == np.int64 for tokens in expected)
    manifest = json.loads((bundle.root / MANIFEST).read_text())
    model = onnx.load(str(bundle.graph_path()))
    next(node for node in model.graph.node if node.op_type == "ArgMax").op_type = "ArgMin"
    files: dict[str, bytes | Path] = {name: bundle.root / name for name in manifest["files"]}
    write_bundle(tmp_path / "wrong.bundle", bundle.manifest, files | {"model.onnx": model.SerializeToString()})
    assert not verify_bundle(tmp_path / "wrong.bundle")


def test_rows_with_a_tie_leave_the_goldens(tmp_path: Path) -> None:
    matrix = np.zeros((4, VOCABULARY))
    matrix[0, 3] = 50.0  # ahead of all where x₀ is positive, and below all, which are equal, where it is negative
    bundle = logits_bundle(tmp_path, weights=matrix, time=False)
    rows = sum(len(inputs["x"]) for _, inputs, _ in bundle.goldens())
    clear = sum(int((inputs["x"][:, 0] > 0).sum()) for _, inputs, _ in bundle.goldens())
    assert 0 < clear < rows
    optimize(bundle, tmp_path / "out.bundle", head=Head())
    after = Bundle.open(tmp_path / "out.bundle")
    kept = [(inputs["x"], outputs) for _, inputs, outputs in after.goldens()]
    assert sum(len(x) for x, _ in kept) == clear
    assert all((x[:, 0] > 0).all() for x, _ in kept)
    assert all((outputs["token"] == 3).all() and len(outputs["other"]) == len(x) for x, outputs in kept)


def test_goldens_that_are_all_ties_are_refused_with_the_reason(tmp_path: Path) -> None:
    bundle = logits_bundle(tmp_path, weights=np.ones((4, VOCABULARY)))
    with pytest.raises(
        ParityRefused, match="every row of the goldens has logits closer than .* so its tokens cannot be proved"
    ):
        optimize(bundle, tmp_path / "out.bundle", head=Head())
    assert not (tmp_path / "out.bundle").exists()


def test_more_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="top-k=9 of a vocabulary of 9 leaves nothing out; ask for fewer than 9"):
        optimize(logits_bundle(tmp_path), tmp_path / "out.bundle", head=Head(VOCABULARY))


def test_a_graph_without_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="m has no output 'logits' for a head to read; it has: other, scores"):
        optimize(logits_bundle(tmp_path, output="scores"), tmp_path / "out.bundle", head=Head())


@pytest.mark.parametrize("text", ["best", "top-k", "top-k=0", "top-k=-1", "top-k=x", "argmax=2"])
def test_an_unknown_head_says_which_there_are(text: str) -> None:
    with pytest.raises(OptionError, match=r"there is no head .*; write argmax, or top-k=8"):
        Head.parse(text)


def test_heads_are_written_as_they_are_read() -> None:
    assert [str(Head.parse(text)) for text in ("argmax", "top-k=8")] == ["argmax", "top-k=8"]
