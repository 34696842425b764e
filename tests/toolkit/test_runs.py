"""Whole runs of every kind: they learn, resume, start from each other, leave records, and can be shared by processes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from architectures.catalog import find
from architectures.run_directory import Run
from runtime.errors import DataError, OptionError, SourceError
from toolkit import cli
from toolkit.training import loop
from toolkit.training.distributed import Group
from toolkit.training.recipe import Recipe

from ..helpers import ROOT, environment
from .tiny import largest_difference, recipe, train, train_cut_and_resumed

# resuming


@pytest.mark.parametrize("name", ["lstm", "gpt", "seq2seq", "seq2seq-attention", "transformer", "kernel-regression"])
def test_a_cut_run_of_every_kind_resumes_to_the_same_bits(
    name: str, tmp_path: Path, text_file: Path, pairs_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = {"lstm": text_file, "gpt": text_file, "kernel-regression": None}.get(name, pairs_file)
    settings: dict[str, object] = {"data.limit": 60, "epochs": 3, "ema": 0.9, "warmup": 2, "schedule": "cosine", "clip": 1.0}
    settings |= {"data.path": str(path), "window": 16} if path else {"data.name": "diabetes"}
    if name in ("lstm", "seq2seq", "seq2seq-attention"):
        settings |= {"network.hidden": 8, "network.embedding": 8}
    if name in ("gpt", "transformer"):
        settings |= {"network.width": 8, "network.heads": 2}
    chosen = recipe(name, **settings)
    whole = train(chosen, tmp_path / "whole")
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", -1.0)
    assert largest_difference(whole, train_cut_and_resumed(chosen, tmp_path / "cut")) == 0


# learning


def test_a_small_seq2seq_learns_to_spell(tmp_path: Path, pairs_file: Path) -> None:
    settings = {"data.path": str(pairs_file), "network.hidden": 48, "network.embedding": 16, "network.dropout": 0.0}
    chosen = recipe("seq2seq-attention", epochs=25, batch_size=32, learning_rate=0.01, **settings)
    run, parts = loop.start(chosen, tmp_path / "run")
    run = loop.train(run, parts, tmp_path / "run")
    assert run.metrics is not None
    assert run.metrics["details"]["test"]["per"] < 5
    assert set(run.metrics["details"]["test"]) == {"per", "wer", "bleu"}
    assert (tmp_path / "run" / "attention.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["lstm", "gpt"])
def test_a_small_language_model_beats_letters_drawn_by_frequency(name: str, tmp_path: Path, text_file: Path) -> None:
    sizes = {"network.hidden": 48} if name == "lstm" else {"network.width": 32, "network.heads": 2, "network.dropout": 0.0}
    chosen = recipe(name, epochs=20, learning_rate=0.01, window=32, batch_size=8, **sizes, **{"data.path": str(text_file)})
    run, parts = loop.start(chosen, tmp_path / "run")
    run = loop.train(run, parts, tmp_path / "run")
    counts = np.bincount(parts.train.ids)
    shares = counts[counts > 0] / counts.sum()
    entropy = float(-(shares * np.log2(shares)).sum())
    assert run.metrics is not None
    assert run.metrics["test"] < 0.75 * entropy


def test_decoding_stops_at_the_last_position(tmp_path: Path) -> None:
    """Targets as long as the network has positions: an untrained network that never ends must be cut there."""
    rows = "".join(f"{'ab' * (n % 7 + 1)}{n}\t{' '.join('xy'[n >> k & 1] for k in range(9))}\n" for n in range(40))
    (tmp_path / "p.tsv").write_text("source\ttarget\n" + rows)
    settings = {"data.path": str(tmp_path / "p.tsv"), "network.width": 8, "network.heads": 2, "network.max_positions": 18}
    run, parts = loop.start(recipe("transformer", epochs=1, **settings), tmp_path / "run")
    run = loop.train(run, parts, tmp_path / "run")
    assert run.status == "complete"


# starting from an earlier run


def test_fine_tuning_with_frozen_features_changes_the_head_alone(tmp_path: Path) -> None:
    settings = {"data.name": "digits", "data.limit": 200}
    first = train(recipe("resnet-small", **settings), tmp_path / "first")
    images = tmp_path / "halves.npz"  # two classes instead of ten: the head must be a new one
    from toolkit.data.digits import load

    digits = load()
    np.savez(images, inputs=digits.inputs[:120, 0], targets=(digits.targets[:120] >= 5).astype(np.int64))
    second = train(
        recipe("resnet-small", start=str(tmp_path / "first"), freeze=True, **{"data.path": str(images)}), tmp_path / "second"
    )
    heads = find("resnet-small").head
    for name, tensor in second.items():
        inner = name.removeprefix("network.")
        if any(inner.startswith(head) for head in heads):
            assert tensor.shape[0] == 2
        elif name.startswith("network."):
            assert torch.equal(tensor, first[name]), name


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    train(recipe(), tmp_path / "mlp")
    with pytest.raises(SourceError, match="holds a mlp, but this recipe trains a softmax"):
        loop.start(Recipe("softmax").with_settings({"data.name": "digits", "start": str(tmp_path / "mlp")}), tmp_path / "x")
    with pytest.raises(SourceError, match=r"does not fit this mlp: layers.0.weight is \[16, 64\], expected \[12, 64\]"):
        loop.start(recipe(start=str(tmp_path / "mlp"), **{"network.hidden": "12"}), tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(OptionError, match="name it with training.start"):
        recipe(freeze=True)


def test_a_symbol_outside_the_earlier_vocabulary_is_refused(tmp_path: Path, text_file: Path) -> None:
    settings = {"network.hidden": 8, "window": 16}
    train(recipe("gru", **settings, **{"data.path": str(text_file)}), tmp_path / "first")
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(["alpha beta Ω gamma"] * 40))
    with pytest.raises(DataError, match="'Ω' is outside the vocabulary"):
        loop.start(recipe("gru", start=str(tmp_path / "first"), **settings, **{"data.path": str(other)}), tmp_path / "second")


def test_a_run_over_words_goes_on_with_its_own_data(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = "".join(f"{' '.join(f'w{n}' for n in random.integers(0, 60, 5))},{k % 2}\n" for k in range(60))
    (tmp_path / "t.csv").write_text("text,label\n" + rows)
    settings = {"data.path": str(tmp_path / "t.csv"), "data.task": "classification", "network.hidden": 8}
    train(recipe("gru", **settings), tmp_path / "first")
    train(recipe("gru", start=str(tmp_path / "first"), **settings), tmp_path / "second")
    assert Run.open(tmp_path / "second").status == "complete"


def test_freezing_a_network_without_a_head_is_refused(tmp_path: Path) -> None:
    settings = {"data.name": "diabetes", "data.limit": 60}
    train(recipe("kernel-regression", **settings), tmp_path / "first")
    with pytest.raises(OptionError, match="has no head to train alone"):
        loop.start(recipe("kernel-regression", start=str(tmp_path / "first"), freeze=True, **settings), tmp_path / "x")


# records


def test_curves_are_the_history_and_a_picture(tmp_path: Path) -> None:
    train(recipe(epochs=3, schedule="cosine"), tmp_path / "run")
    metrics = Run.open(tmp_path / "run").metrics
    assert metrics is not None
    with (tmp_path / "run" / "curves.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3]
    for row, entry in zip(rows, metrics["history"], strict=True):
        assert float(row["loss"]) == entry["loss"]
        assert float(row["accuracy"]) == entry["accuracy"]
    assert float(rows[0]["learning_rate"]) > float(rows[2]["learning_rate"])
    for name in ("curves.png", "confusion.png"):
        assert (tmp_path / "run" / name).read_bytes().startswith(b"\x89PNG")
    assert np.sum(metrics["confusion"]) == 60  # the test part of 300 rows
    assert 100 * np.trace(metrics["confusion"]) / 60 == pytest.approx(metrics["test"])


def test_a_record_is_enough_to_train_the_same_weights_again(tmp_path: Path, text_file: Path) -> None:
    settings = {"data.path": str(text_file), "network.width": 16, "network.heads": 2, "window": 16, "ema": 0.9}
    first = train(recipe("gpt", **settings), tmp_path / "first")
    record = json.loads((tmp_path / "first" / "run.json").read_text())
    again = train(Recipe.from_json(record["recipe"], "run.json"), tmp_path / "again")
    assert largest_difference(first, again) == 0


@pytest.mark.parametrize("name", ["seq2seq", "seq2seq-attention", "transformer"])
def test_attention_maps_are_shares_of_the_source(name: str, tmp_path: Path, pairs_file: Path) -> None:
    from toolkit.training.records import attention_maps
    from toolkit.training.tasks.seq2seq import Seq2SeqTask

    sizes = {"network.width": 8, "network.heads": 2} if name == "transformer" else {"network.hidden": 8, "network.embedding": 8}
    run, parts = loop.start(recipe(name, **{"data.path": str(pairs_file)}, **sizes), tmp_path / "run")
    network, _ = run.build()
    task = Seq2SeqTask(Recipe.from_json(run.recipe, "run").training, positions=None)
    maps = attention_maps(network.eval(), parts, task)
    assert bool(maps) == (name != "seq2seq")  # which has none
    for source, decoded, weights in maps:
        assert weights.shape == (len(decoded), len(source))
        assert source[-1] == decoded[-1] == "<eos>"
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)


# folds


def test_folds_validate_on_every_row_once_and_leave_the_test_part_alone(tmp_path: Path) -> None:
    seen, tests, counts = [], [], []
    for fold in range(4):
        _, parts = loop.start(recipe(**{"data.folds": 4, "data.fold": fold}), tmp_path / str(fold))
        seen.append({row.tobytes() for row in parts.validation.inputs})
        tests.append({row.tobytes() for row in parts.test.inputs})
        assert not seen[-1] & {row.tobytes() for row in parts.train.inputs}
        counts.append(np.bincount(parts.validation.targets, minlength=10))
    assert all(test == tests[0] for test in tests)
    assert sum(map(len, seen)) == len(set.union(*seen)) == 240
    assert np.ptp(counts, axis=0).max() <= 1  # classes are spread evenly


def test_the_folds_option_trains_them_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--set", "epochs=1", "--set", "threads=1", "--set", "data.limit=200")
    command = ["train", "softmax", "--folds", "3", "-o", str(tmp_path / "folds"), *options]
    assert cli.run(command) == 0
    summary = json.loads((tmp_path / "folds" / "folds.json").read_text())
    values = [Run.open(tmp_path / "folds" / f"fold-{number}").metrics["validation"] for number in (1, 2, 3)]  # type: ignore[index]
    assert summary["folds"] == values
    assert summary["mean"] == pytest.approx(np.mean(values))
    assert cli.run(command) == 2
    assert "already exists" in capfd.readouterr().err


# several processes


def test_shares_cover_a_batch_and_weigh_as_one() -> None:
    for rows in (1, 2, 3, 7, 8):
        shares = [Group(rank, 3).share(rows) for rank in range(3)]
        weights = [Group(rank, 3).weight(rows) for rank in range(3)]
        total = sum(weight * (stop - start) for (start, stop), weight in zip(shares, weights, strict=True)) / 3
        assert total == rows


def torchrun(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    return subprocess.run(
        [*command, "-m", "toolkit", "train", *map(str, arguments), "-o", str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment() | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("name", ["mlp", "gru"])
def test_two_processes_reach_the_weights_of_one(name: str, tmp_path: Path, text_file: Path) -> None:
    settings = {
        "mlp": {"data.name": "digits", "data.limit": 301, "network.hidden": "16", "network.dropout": 0.0, "batch_size": 50},
        "gru": {"data.path": text_file, "network.hidden": 16, "network.dropout": 0.0, "window": 16, "batch_size": 7},
    }[name]
    settings |= {"epochs": 3, "threads": 1, "keep": "last", "clip": 1.0, "accumulate": 2}
    alone = train(Recipe(name).with_settings({key: str(value) for key, value in settings.items()}), tmp_path / "alone")
    (tmp_path / "recipe.toml").write_text(f'architecture = "{name}"\n')
    options = [item for key, value in settings.items() for item in ("--set", f"{key}={value}")]
    result = torchrun(tmp_path / "two", tmp_path / "recipe.toml", *options)
    assert result.returncode == 0, result.stderr[-2000:]
    together = load_file(tmp_path / "two" / "weights.safetensors")
    assert largest_difference(alone, together) < 1e-4
    assert result.stdout.count("run: ") == 1  # one process speaks
    one, two = (Run.open(tmp_path / folder).metrics for folder in ("alone", "two"))
    assert one is not None
    assert two is not None
    assert one["test"] == pytest.approx(two["test"], rel=0.02)
