"""What the commands do with bundles of networks on text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from architectures.run_directory import Run
from exporters.export import export
from exporters.source import find_source
from runtime.bundle import Bundle
from runtime.text import Tokenizer
from toolkit.cli import run
from toolkit.text_evaluation import text_for

from .tiny import recipe, train

Shared = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture
def seq2seq(shared: Shared) -> Path:
    settings = {"vocabulary": 20, "target_vocabulary": 20, "hidden": 8, "embedding": 8}
    return shared("tiny-seq2seq", lambda folder: export(find_source("seq2seq", settings), folder / "x.bundle")) / "x.bundle"


def test_a_trained_language_model_carries_its_tokenizer_and_how_to_decode(gpt: Path) -> None:
    manifest = Bundle.open(gpt).manifest
    assert manifest.task == "language-model"
    assert manifest.generation == {"bos": 1, "eos": 2, "pad": 0, "longest": 256}
    tokenizer = Tokenizer.open(gpt / manifest.tokenizers["text"])
    trained = Run.open(gpt.parent / "run").load_tokenizers(gpt.parent / "run")["text"]
    assert tokenizer.to_json() == trained.to_json()
    assert str(gpt.parent) not in (gpt / "manifest.json").read_text()


def test_an_altered_tokenizer_is_noticed(gpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    shutil.copytree(gpt, tmp_path / "x.bundle")
    path = tmp_path / "x.bundle" / "tokenizer-text.json"
    path.write_text(path.read_text().replace("e", "E"))
    assert run(["verify", str(tmp_path / "x.bundle")]) == 1
    assert "tokenizer-text.json of" in capsys.readouterr().err


def test_a_trained_language_model_is_quantized_and_keeps_its_tokenizer(
    gpt: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "q.bundle"
    command = ["quantize", str(gpt), "--scheme", "int4-weights", "-o", str(target), "--max-drop", "50", "--threads", "1"]
    assert run([*command, "--for-size"]) == 0
    out = capsys.readouterr().out
    assert "likelihood" in out  # its text is not at hand
    assert "nats a token, the likeliest token is the same for" in out
    assert run(["verify", str(target)]) == 0
    assert Bundle.open(target).manifest.tokenizers == Bundle.open(gpt).manifest.tokenizers
    capsys.readouterr()
    assert run([*command, "--for-size", "--force", "--json", "--data", str(text_file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["metric"], report["metric_data"][:25]) == ("perplexity", "the test part of text.txt")
    assert 1 < report["metric_before"] != report["metric_after"]
    assert any("the likeliest token is the same for" in note for note in report["notes"])
    assert run([*command, "--for-size", "--force", "--data", str(gpt / "manifest.json")]) == 2
    assert "manifest.json is not of a known kind; expected a .csv, .tsv" in capsys.readouterr().err


def test_pairs_are_judged_by_the_error_rate_of_what_is_decoded(
    shared: Shared, pairs_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(folder: Path) -> None:
        settings = {"network.hidden": 32, "network.embedding": 32, "data.path": str(pairs_file), "epochs": 8}
        train(recipe("seq2seq-attention", **settings), folder / "run")
        export(find_source(str(folder / "run")), folder / "x.bundle")

    bundle = shared("quantized-pairs", make) / "x.bundle"
    capsys.readouterr()  # of the training
    command = ["quantize", str(bundle), "--scheme", "int8-weights", "-o", str(tmp_path / "q.bundle"), "--for-size", "--json"]
    assert run([*command, "--data", str(pairs_file), "--max-drop", "30"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["metric"], report["unit"]) == ("error rate", "%")
    assert run(["evaluate", str(bundle), "--data", str(pairs_file), "--json"]) == 0
    assert report["metric_before"] == pytest.approx(json.loads(capsys.readouterr().out)["metrics"]["per"])
    assert report["drop"] == pytest.approx(report["metric_after"] - report["metric_before"])


@pytest.mark.parametrize("own", [False, True])
def test_a_trained_language_model_is_calibrated_on_texts(
    own: bool,
    gpt: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user's own, or without any data at hand, what it writes after random tokens."""
    monkeypatch.setattr("exporters.quantizers.scheme.FEWEST_WEIGHTS", 0)  # a network as tiny as this is not worth it
    target = tmp_path / "q.bundle"
    command = ["quantize", str(gpt), "--scheme", "int8-static", "-o", str(target), "--max-drop", "50", "--threads", "1"]
    data = ["--data", str(text_file)] if own else []
    assert run([*command, "--for-size", "--set", "ranges=mse", *data]) == 0
    assert "int8-static (ranges=mse)" in capsys.readouterr().out
    assert run(["verify", str(target)]) == 0
    assert "QuantizeLinear" in Bundle.open(target).manifest.requirements["operators"]


def test_calibration_data_that_cannot_be_used_is_told_in_one_line(
    gpt: Path, seq2seq: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "text.txt").write_text("alpha beta. " * 50)
    for bundle, data, message in (
        (gpt, tmp_path / "empty.txt", "empty.txt"),
        (gpt, tmp_path / "missing.txt", "there is no"),
        (seq2seq, tmp_path / "text.txt", "has no tokenizer to read"),
    ):
        command = ["quantize", str(bundle), "--scheme", "int8-static", "-o", str(tmp_path / "q.bundle"), "--data", str(data)]
        assert run(command) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert message in line
        assert not (tmp_path / "q.bundle").exists()


def test_a_network_on_text_that_does_not_generate_is_judged_by_its_own_answers(
    shared: Shared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"vocabulary": 100, "width": 64, "heads": 2, "layers": 1, "feedforward": 128}
    bert = shared("tiny-bert", lambda folder: export(find_source("bert", settings), folder / "x.bundle")) / "x.bundle"
    command = ["quantize", str(bert), "--scheme", "int8-weights", "-o", str(tmp_path / "q.bundle")]
    assert run([*command, "--for-size", "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["metric"], report["metric_data"]) == ("agreement", "the goldens' inputs, against fp32")
    assert 95 < report["metric_after"] < 100
    assert list(Bundle.open(tmp_path / "q.bundle").manifest.graphs) == ["model"]
    assert run(["verify", str(tmp_path / "q.bundle")]) == 0


def test_texts_calibrate_a_network_of_masked_text(
    shared: Shared, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(folder: Path) -> None:
        tiny = {"network.width": 16, "network.heads": 2, "network.layers": 1, "network.feedforward": 32}
        train(recipe("bert", **tiny, **{"data.path": str(text_file), "window": 16}), folder / "run")
        export(find_source(str(folder / "run")), folder / "bert.bundle")

    monkeypatch.setattr("exporters.quantizers.scheme.FEWEST_WEIGHTS", 0)
    bert = shared("tiny-trained-bert", make) / "bert.bundle"
    command = ["quantize", str(bert), "--scheme", "int8-static", "--for-size", "--max-drop", "50", "--threads", "1", "--json"]
    stored = []
    for name, data in (("mine", ["--data", str(text_file)]), ("none", [])):
        assert run([*command, "-o", str(tmp_path / f"{name}.bundle"), *data]) == 0
        assert json.loads(capsys.readouterr().out)["metric_data"] == "the goldens' inputs, against fp32"
        stored.append(Bundle.open(tmp_path / f"{name}.bundle").graph_path().read_bytes())
    assert stored[0] != stored[1]  # other samples, other ranges


def test_run_takes_named_arrays_of_one_graph_and_refuses_several(
    gpt: Path, seq2seq: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from runtime.state import step_feeds

    feeds = step_feeds(Bundle.open(gpt).graph()[1].signature, 1, past=3)
    np.savez(tmp_path / "x.npz", **feeds)  # type: ignore[arg-type]
    assert run(["run", str(gpt), "--input", str(tmp_path / "x.npz")]) == 0
    assert capsys.readouterr().out.startswith("logits: float32[1, 1, ")
    assert run(["run", str(seq2seq), "--input", str(tmp_path / "x.npz")]) == 2
    assert "has several graphs (encoder, decoder) and --input is for bundles of one" in capsys.readouterr().err


def test_bench_times_a_step_of_the_decoder_or_the_graph_that_is_named(
    seq2seq: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--rounds", "1", "--launches", "1", "--batch", "1", "--threads", "1", "--json"]
    assert run(["bench", str(seq2seq), "--past", "9", *quick]) == 0
    assert json.loads(capsys.readouterr().out)["footprints"][0]["inputs"] == "decoder: one token after 9"
    assert run(["bench", str(seq2seq), "--graph", "encoder", *quick]) == 0
    assert json.loads(capsys.readouterr().out)["footprints"][0]["inputs"] == "source[batch, 6]"
    assert run(["bench", str(seq2seq), "--graph", "model", *quick]) == 2
    assert "has no graph 'model'; it has: encoder, decoder" in capsys.readouterr().err
    assert run(["bench", str(seq2seq), "--vs", "torch", *quick]) == 2
    assert "--vs torch times networks on images and columns" in capsys.readouterr().err


def test_export_shows_graphs_laws_and_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [f"--set={name}" for name in ("vocabulary=20", "width=16", "heads=2", "layers=1", "feedforward=32")]
    target = str(tmp_path / "x.bundle")
    assert run(["export", "gpt", "-o", target, *sets, "--profile", "portable", "--fix", "batch=2"]) == 0
    out = capsys.readouterr().out
    assert "law: reorder = recompute: error" in out
    assert "portable profile" in out
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("bundle:"))
    for wrong, message in [("batch", "expected AXIS=SIZE"), ("bath=2", "did you mean 'batch'")]:
        assert run(["export", "gpt", "-o", target, "--force", "--fix", wrong]) == 2
        assert message in capsys.readouterr().err
    assert run(["export", "x.onnx", "-o", target, "--force", "--profile", "portable"]) == 2
    assert "are for networks; a .onnx file is what it is" in capsys.readouterr().err


def test_texts_to_calibrate_on_are_of_the_training_part_or_the_users_own(gpt: Path, text_file: Path, tmp_path: Path) -> None:
    from toolkit.text_calibration import text_calibration

    bundle = Bundle.open(gpt)
    tokenizer = Tokenizer.open(gpt / bundle.manifest.tokenizers["text"])
    mine = tmp_path / "mine.txt"
    mine.write_text("\n\n".join(["gamma gamma gamma gamma gamma."] * 40))
    prompts = [feeds["tokens"] for feeds in text_calibration(bundle, str(mine))("decoder") if feeds["tokens"].shape[1] > 1]
    assert {letter for prompt in prompts for row in prompt for letter in tokenizer.decode(row.tolist())} <= set("gam .\n")
    held_out, _ = text_for(bundle, str(text_file))
    training, where = text_for(bundle, str(text_file), part="training")
    assert where.startswith("the training part of")
    assert len(training) > len(held_out)
