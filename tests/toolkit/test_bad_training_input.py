"""What a user can get wrong when training: one clear line, exit 2, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from toolkit.cli import run
from toolkit.training import loop
from toolkit.training.recipe import Recipe


def texts(path: Path, content: str | bytes) -> list[str]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return ["--data", str(path)]


LONG = "source\ttarget\n" + "".join(f"{'a' * (n % 9 + 1)}{n}\tx y z\n" for n in range(30)) + "b" * 50 + "\tx\n"
LABELLED = "text,label\n" + "".join(f"word{n} common,{'ab'[n % 2]}\n" for n in range(30))
STREAM = "\n\n".join(f"line {n} of some text that is long enough" for n in range(60))

CASES: dict[str, tuple[list[str], Callable[[Path], list[str]], str]] = {
    "an empty text file": (["gpt"], lambda f: texts(f / "e.txt", ""), "is empty"),
    "an empty table of pairs": (["transformer"], lambda f: texts(f / "e.tsv", ""), "is empty"),
    "an empty table of texts": (["gru-classifier"], lambda f: texts(f / "e.csv", ""), "is empty"),
    "an empty table": (["mlp"], lambda f: texts(f / "e.csv", ""), "is empty"),
    "a text of a few letters": (["gpt"], lambda f: texts(f / "s.txt", "abc"), "s.txt"),
    "one class only": (["gru-classifier"], lambda f: texts(f / "o.csv", LABELLED.replace(",b", ",a")), "single"),
    "a text that is not UTF-8": (
        ["gpt"],
        lambda f: [(f / "l.txt").write_bytes(b"\xff\xfe\xfa" * 50), "--data", str(f / "l.txt")][1:],
        "UTF-8",
    ),  # type: ignore[list-item]
    "a sequence longer than the positions": (
        ["transformer", "--set", "network.max_positions=20"],
        lambda f: texts(f / "p.tsv", LONG),
        "the longest sequence has 52 tokens but positions go to 20",
    ),
    "a window longer than the positions": (
        ["gpt", "--set", "network.max_positions=64"],
        lambda f: texts(f / "t.txt", STREAM),
        "but the network has 64 positions; set training.window=64",
    ),
    "a vocabulary that the data does not have": (
        ["gpt", "--set", "network.vocabulary=5"],
        lambda f: texts(f / "t.txt", STREAM),
        "network.vocabulary is 5, but t.txt needs",
    ),
    "an unknown key": (["gpt", "--set", "training.epoch=3"], lambda f: [], "did you mean 'epochs'"),
    "an unknown network key": (["gpt", "--set", "network.depth=3"], lambda f: [], "no gpt setting named 'depth'"),
    "a wrong type": (["gpt", "--set", "epochs=many"], lambda f: [], "expected a whole number"),
    "an impossible schedule": (
        ["gpt", "--set", "schedule=linear"],
        lambda f: [],
        "no value for training.schedule named 'linear'",
    ),
    "text for an image network": (["lenet"], lambda f: texts(f / "t.txt", STREAM), "this network does classification"),
    "images for a text network": (["gpt", "--set", "data.name=digits"], lambda f: [], "digits is data for classification"),
    "pairs for a language model": (["gpt", "--set", "data.name=cmudict"], lambda f: [], "cmudict is data for seq2seq"),
    "a bidirectional language model": (["gru", "--set", "network.bidirectional=true"], lambda f: [], "cannot be bidirectional"),
    "an unknown data set": (["gpt", "--set", "data.name=topic"], lambda f: [], "did you mean 'topics'"),
    "a start that is no run": (["mlp", "--set", "start=nowhere"], lambda f: [], "nowhere is not a run"),
    "a fold that is not there": (["mlp", "--set", "data.folds=3", "--set", "data.fold=3"], lambda f: [], "expected 0 to 2"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_told_in_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, make, message = CASES[case]
    code = run(["train", *arguments, *make(tmp_path), "-o", str(tmp_path / "run")])
    errors = capsys.readouterr().err
    assert code == 2, errors
    assert errors.startswith("error: ")
    assert len(errors.strip().splitlines()) == 1
    assert message in errors
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_architecture_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "d.npz", inputs=np.random.default_rng(0).standard_normal((40, 3)), targets=np.arange(40) % 2)
    first, parts = loop.start(
        Recipe("softmax").with_settings({"data.path": str(tmp_path / "d.npz"), "epochs": 1, "threads": 1}), tmp_path / "first"
    )
    loop.train(first, parts, tmp_path / "first")
    code = run(["train", "mlp", "--set", f"start={tmp_path / 'first'}", "-o", str(tmp_path / "run")])
    assert code == 2
    assert "holds a softmax, but this recipe trains a mlp" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
