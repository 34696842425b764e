"""edgekit evaluate on networks on text gives what training measured on the same held-out part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from architectures.run_directory import Run
from exporters.export import export
from exporters.source import find_source
from toolkit.cli import run

from .tiny import recipe, train

Shared = Callable[[str, Callable[[Path], object]], Path]


def made(shared: Shared, name: str, data: Path, **settings: Any) -> Path:
    """The bundle of a short training on a file of one's own, beside its run."""

    def make(folder: Path) -> None:
        train(recipe(name, **settings, **{"data.path": str(data)}), folder / "run")
        export(find_source(str(folder / "run")), folder / "x.bundle")

    return shared(f"evaluated-{name}-{data.stem}", make) / "x.bundle"


def evaluated(bundle: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    assert run(["evaluate", str(bundle), "--threads", "1", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def trained_metrics(bundle: Path) -> dict[str, float]:
    metrics = Run.open(bundle.parent / "run").metrics
    assert metrics is not None
    return dict(metrics["details"]["test"])


@pytest.fixture
def labelled_file(tmp_path: Path) -> Path:
    """Half of the words say which class it is."""
    random = np.random.default_rng(0)
    words = {"fruit": ["apple", "pear", "plum"], "metal": ["iron", "zinc", "lead"]}
    rows = [(kind, " ".join(random.choice([*words[kind], "a", "the", "of"], size=3))) for kind in words for _ in range(60)]
    path = tmp_path / "kinds.csv"
    path.write_text("text,label\n" + "".join(f"{text},{kind}\n" for kind, text in rows))
    return path


def test_a_language_model_with_positions_is_judged_as_in_training(
    gpt: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluated(gpt, capsys, "--data", str(text_file))
    assert report["metrics"] == pytest.approx(trained_metrics(gpt), rel=1e-4)
    assert report["data"].startswith("the test part of text.txt, ")
    assert run(["evaluate", str(gpt), "--data", str(text_file), "--threads", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("bpc: ")
    assert "evaluating " in shown.err


def test_a_language_model_trained_on_all_its_positions_is_judged_on_all_of_them(
    shared: Shared, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"network.width": 16, "network.heads": 2, "network.layers": 1, "network.feedforward": 32}
    bundle = made(shared, "gpt", text_file, **tiny, **{"network.max_positions": 16, "window": 16})
    report = evaluated(bundle, capsys, "--data", str(text_file))
    assert report["metrics"] == pytest.approx(trained_metrics(bundle), rel=1e-4)


def test_a_language_model_with_a_hidden_state_is_judged_as_in_training(
    shared: Shared, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = made(shared, "gru", text_file, **{"network.hidden": 16, "network.embedding": 8, "window": 16})
    report = evaluated(bundle, capsys, "--data", str(text_file))
    assert report["rows"] > 512, "it is read in several pieces"
    assert report["metrics"] == pytest.approx(trained_metrics(bundle), rel=1e-4)


def test_an_encoder_decoder_is_judged_as_in_training(
    shared: Shared, pairs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"network.hidden": 32, "network.embedding": 16, "epochs": 12, "batch_size": 32, "learning_rate": 0.01}
    bundle = made(shared, "seq2seq-attention", pairs_file, **settings)
    report = evaluated(bundle, capsys, "--data", str(pairs_file))
    assert report["metrics"] == pytest.approx(trained_metrics(bundle), rel=1e-4)
    assert 0 < report["metrics"]["per"] < 90, "some are right and some are wrong"


def test_a_classifier_of_texts_is_judged_as_in_training(
    shared: Shared, labelled_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = {"data.task": "classification", "network.hidden": 8, "network.embedding": 8}
    bundle = made(shared, "gru", labelled_file, **settings)
    report = evaluated(bundle, capsys, "--data", str(labelled_file))
    assert report["metrics"]["accuracy"] == pytest.approx(trained_metrics(bundle)["accuracy"])
    other = tmp_path / "other.csv"
    other.write_text("text,label\n" + "the apple,fruit\nzinc,metal\n" * 6)
    assert evaluated(bundle, capsys, "--data", str(other))["data"] == "all 12 texts of other.csv"
    other.write_text(other.read_text().replace("metal", "wood"))
    assert run(["evaluate", str(bundle), "--data", str(other)]) == 2
    assert "has the class 'wood', which the network does not know; it knows: fruit, metal" in capsys.readouterr().err


def test_what_cannot_be_evaluated_says_why(
    gpt: Path, shared: Shared, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", str(gpt)]) == 2
    error = capsys.readouterr().err
    assert "gpt.bundle was trained on text.txt; pass it, or data of that kind with --data PATH" in error
    settings = {"vocabulary": 20, "target_vocabulary": 20, "hidden": 8, "embedding": 8}
    fresh = shared("tiny-seq2seq", lambda folder: export(find_source("seq2seq", settings), folder / "x.bundle")) / "x.bundle"
    assert run(["evaluate", str(fresh), "--data", str(text_file)]) == 2
    assert "x.bundle has no tokenizer to read texts with; export it from a run, which has one" in capsys.readouterr().err
    settings = {"vocabulary": 100, "width": 64, "heads": 2, "layers": 1, "feedforward": 128}
    bert = shared("tiny-bert", lambda folder: export(find_source("bert", settings), folder / "x.bundle")) / "x.bundle"
    assert run(["evaluate", str(bert)]) == 2
    assert "there is no metric for the task 'masked-lm' yet; edgekit verify replays the goldens" in capsys.readouterr().err
