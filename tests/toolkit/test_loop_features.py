"""What a recipe can ask of the loop: each does what it says, and says so when it cannot."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from architectures.catalog import find
from architectures.layers.feedforward import FeedForward
from architectures.run_directory import Run
from runtime.errors import DataError, OptionError, SourceError
from toolkit.training import loop
from toolkit.training.augment import Augmentation, flip, rotate_and_crop
from toolkit.training.averaging import MovingAverage
from toolkit.training.distributed import Group
from toolkit.training.optimizers import make_optimizer
from toolkit.training.recipe import Recipe, TrainingSettings
from toolkit.training.schedules import Schedule
from toolkit.training.steps import Stepper
from toolkit.training.tasks import task_for
from toolkit.training.tasks.task import bucketed

from ..helpers import ROOT, edgekit, environment


def recipe(architecture: str = "mlp", **settings: object) -> Recipe:
    """A tiny training without dropout."""
    defaults: dict[str, object] = {"epochs": 2, "threads": 1, "keep": "last"}
    if architecture == "mlp":
        defaults |= {"data.name": "digits", "data.limit": 300, "network.hidden": "16", "network.dropout": 0.0}
    return Recipe(architecture).with_settings(defaults | settings)


def train(chosen: Recipe, directory: Path) -> dict[str, torch.Tensor]:
    run, parts = loop.start(chosen, directory)
    loop.train(run, parts, directory)
    return load_file(directory / "weights.safetensors")


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    lines = [" ".join(random.choice(words, size=8)) + "." for _ in range(120)]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(lines))
    return path


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    """Letters to their names: a task that a small network learns quickly."""
    random = np.random.default_rng(0)
    names = {"a": "AY", "b": "BEE", "c": "SEE", "d": "DEE"}
    words = sorted({"".join(random.choice(list(names), size=random.integers(1, 6))) for _ in range(300)})
    path = tmp_path / "pairs.tsv"
    path.write_text("source\ttarget\n" + "".join(f"{word}\t{' '.join(names[c] for c in word)}\n" for word in words))
    return path


# schedules


def test_every_schedule_grows_linearly_through_its_warm_up() -> None:
    for kind in ("constant", "step", "cosine", "inverse-sqrt"):
        shares = [Schedule(kind, 100, warmup=4, steps_an_epoch=10).share(step) for step in range(4)]
        np.testing.assert_allclose(shares, [0.2, 0.4, 0.6, 0.8])


def test_cosine_falls_from_one_to_zero_and_is_half_in_the_middle() -> None:
    schedule = Schedule("cosine", 110, warmup=10)
    assert schedule.share(10) == 1.0
    assert schedule.share(60) == pytest.approx(0.5)
    assert schedule.share(110) == pytest.approx(0.0)


def test_step_multiplies_after_whole_epochs() -> None:
    schedule = Schedule("step", 100, steps_an_epoch=10, step_every=2, step_factor=0.5)
    assert [schedule.share(step) for step in (0, 19, 20, 39, 40)] == [1, 1, 0.5, 0.5, 0.25]


def test_inverse_square_root_is_the_papers_rate() -> None:
    schedule = Schedule("inverse-sqrt", 10_000, warmup=400)
    for step in (400, 1600, 6400):
        assert schedule.share(step) == pytest.approx(math.sqrt(400 / step))


# optimizer, averages, pieces


def test_weight_decay_spares_biases_and_norms() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Embedding(5, 4))
    optimizer = make_optimizer(module, TrainingSettings(optimizer="adamw", weight_decay=0.1, learning_rate=0.01))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, parameter in module.named_parameters() if id(parameter) in decayed}
    assert names == {"0.weight", "2.weight", "4.weight"}


def test_the_moving_average_is_its_recurrence() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 1.0)
    average, expected = MovingAverage(module, 0.9), 1.0
    for step in range(1, 40):
        nn.init.constant_(module.weight, float(step % 3))
        average.update(module, step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * (step % 3)
    assert float(average.weights["weight"]) == pytest.approx(expected, rel=1e-5)


def test_a_run_with_an_average_keeps_the_averaged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of every step, averaged by hand, are the ones that are kept."""
    seen: list[dict[str, torch.Tensor]] = []
    update = MovingAverage.update

    def watch(self: MovingAverage, module: nn.Module, step: int) -> None:
        update(self, module, step)
        seen.append({name: tensor.double().clone() for name, tensor in module.state_dict().items()})

    monkeypatch.setattr(MovingAverage, "update", watch)
    kept = train(recipe(ema=0.8), tmp_path / "averaged")
    torch.manual_seed(0)
    first, _ = Run.open(tmp_path / "averaged").build()
    expected = {name: tensor.double() for name, tensor in first.state_dict().items()}
    for step, weights in enumerate(seen, 1):
        decay = min(0.8, (1 + step) / (10 + step))
        expected = {name: decay * old + (1 - decay) * weights[name] for name, old in expected.items()}
    assert largest_difference(expected, {name: tensor.double() for name, tensor in kept.items()}) < 1e-6
    assert largest_difference(seen[-1], {name: tensor.double() for name, tensor in kept.items()}) > 1e-4


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_a_batch_in_pieces_gives_the_step_of_the_whole_batch(pieces: int, tmp_path: Path) -> None:
    whole = train(recipe(batch_size=60), tmp_path / "whole")
    parts = train(recipe(batch_size=60, accumulate=pieces), tmp_path / "pieces")
    assert largest_difference(whole, parts) < 1e-5


def test_pieces_count_tokens_not_rows(tmp_path: Path, pairs_file: Path) -> None:
    settings = {"data.path": str(pairs_file), "network.hidden": 8, "network.embedding": 8, "network.dropout": 0.0}
    whole = train(recipe("seq2seq", **settings), tmp_path / "whole")
    parts = train(recipe("seq2seq", accumulate=3, **settings), tmp_path / "pieces")
    assert largest_difference(whole, parts) < 1e-5


def test_clipping_bounds_the_gradient_and_changes_nothing_below_the_bound(tmp_path: Path) -> None:
    free = train(recipe(optimizer="sgd"), tmp_path / "free")
    loose = train(recipe(optimizer="sgd", clip=1e6), tmp_path / "loose")
    tight = train(recipe(optimizer="sgd", clip=1e-6), tmp_path / "tight")
    assert largest_difference(free, loose) == 0
    torch.manual_seed(0)
    fresh, _ = Run.open(tmp_path / "tight").build()
    moved = largest_difference(tight, dict(fresh.state_dict()))
    assert 0 < moved < 1e-6


def test_recomputing_blocks_gives_the_same_weights(tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"data.path": str(text_file), "network.width": 16, "network.heads": 2, "network.layers": 2, "window": 16}
    calls = []
    forward = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: (calls.append(self.training), forward(self, x))[1])
    plain = train(recipe("gpt", **settings), tmp_path / "plain")
    once = sum(calls)
    calls.clear()
    again = train(recipe("gpt", recompute=True, **settings), tmp_path / "again")
    assert largest_difference(plain, again) < 1e-6  # dropout included: the same units are dropped again
    assert sum(calls) == 2 * once


@pytest.mark.parametrize("name", ["mlp", "gpt", "lstm", "seq2seq-attention", "transformer"])
def test_bf16_trains_close_to_float32(name: str, tmp_path: Path, text_file: Path, pairs_file: Path) -> None:
    path = {"mlp": None, "gpt": text_file, "lstm": text_file}.get(name, pairs_file)
    settings: dict[str, object] = {} if path is None else {"data.path": str(path), "window": 16, "data.limit": 60}
    if name in ("lstm", "seq2seq-attention"):
        settings |= {"network.hidden": 16, "network.embedding": 16}
    if name in ("gpt", "transformer"):
        settings |= {"network.width": 16, "network.heads": 2}
    losses = []
    for precision in ("float32", "bf16"):
        train(recipe(name, precision=precision, **settings), tmp_path / precision)
        losses.append(Run.open(tmp_path / precision).metrics["history"][-1]["loss"])  # type: ignore[index]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]  # it was another arithmetic


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp16", "device": "cpu"}, "use bf16"),
        ({"recompute": True}, "has none; leave it out"),
        ({"label_smoothing": 0.1, "data.name": "diabetes"}, "this data has quantities"),
        ({"device": "cuda"}, "no GPU can be used here"),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_directory_is_made(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(OptionError, match=message):
        loop.start(recipe(**settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


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
    run, parts = loop.start(chosen, tmp_path / "cut")

    def interrupt(epoch: loop.Epoch) -> None:
        if epoch.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.train(run, parts, tmp_path / "cut", interrupt)
    run, parts = loop.resume(tmp_path / "cut")
    loop.train(run, parts, tmp_path / "cut")
    assert largest_difference(whole, load_file(tmp_path / "cut" / "weights.safetensors")) == 0


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


def test_bits_of_a_stream_are_the_sum_over_its_characters_whatever_the_windows(tmp_path: Path) -> None:
    """Every token is counted once: with a network that always says the same, bits are a known sum."""
    from toolkit.training.tasks.language_model import stream_nats

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))

        def initial_state(self, batch: int) -> tuple[torch.Tensor, ...]:
            return ()

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (self.weight.expand(*tokens.shape, 3),)

    network = Constant()
    chances = torch.log_softmax(torch.tensor([0.0, 1.0, 2.0]), 0)
    for length in (9, 10, 16, 17, 25, 26, 100):
        ids = torch.from_numpy(np.random.default_rng(length).integers(0, 3, length))
        expected = -float(chances[ids[1:]].sum())
        for positions in (None, 8, 64):
            assert stream_nats(network, ids, positions) == pytest.approx(expected, rel=1e-5), (length, positions)


def test_truncated_backpropagation_carries_the_state(tmp_path: Path, text_file: Path) -> None:
    """Windows of one batch follow each other: the target of one is the first input of the next."""
    run, parts = loop.start(recipe("gru", **{"data.path": str(text_file), "window": 16, "batch_size": 8}), tmp_path / "run")
    settings = Recipe.from_json(run.recipe, "run").training
    task = task_for(run, settings, parts.tokenizers)
    batches = list(task.batches(parts.train, torch.Generator().manual_seed(0)))
    assert len(batches) == task.steps(parts.train) > 3
    for before, after in pairwise(batches):
        assert torch.equal(before.targets[0][:, -1], after.inputs[0][:, 0])
    network, _ = run.build()
    states: list[object] = []
    losses = task.losses
    task.losses = lambda module, batch, state: (states.append(state), losses(module, batch, state))[1]  # type: ignore[method-assign]
    Stepper(network, task, settings, Group(), steps_an_epoch=len(batches)).run_epoch(parts.train, 0, lambda done, total: None)
    assert [state is None for state in states] == [True] + [False] * (len(batches) - 1)  # fresh once an epoch, then carried
    _, state = losses(network, batches[0], None)
    assert state is not None
    assert not state[0].requires_grad
    fresh, _ = losses(network, batches[1], None)
    carried, _ = losses(network, batches[1], state)
    assert fresh[0].item() != carried[0].item()


def test_buckets_hold_every_row_once_and_rows_of_like_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 1003)
    batches = bucketed(lengths, 16, torch.Generator().manual_seed(0))
    assert sorted(np.concatenate(batches).tolist()) == list(range(1003))
    waste = sum(len(rows) * lengths[rows].max() - lengths[rows].sum() for rows in batches) / lengths.sum()
    assert waste < 0.1


# augmentation


def test_augmentations_keep_shape_and_are_repeatable_and_off_by_default() -> None:
    images = torch.rand(5, 3, 8, 10)
    assert not Augmentation()
    for change in (
        Augmentation(shift=2),
        Augmentation(rotate=20),
        Augmentation(flip=True),
        Augmentation(crop=0.3),
        Augmentation(noise=0.1),
    ):
        first, second = (change(images, torch.Generator().manual_seed(1), torch.ones(3)) for _ in range(2))
        assert torch.equal(first, second)
        assert first.shape == images.shape
        assert not torch.equal(first, images)


def test_flip_mirrors_whole_images() -> None:
    images = torch.rand(64, 1, 4, 4)
    flipped = flip(images, torch.Generator().manual_seed(0))
    same = (flipped == images).flatten(1).all(1)
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert (same | mirrored).all()
    assert 10 < int(same.sum()) < 54


def test_no_rotation_and_no_crop_leave_images_alone() -> None:
    images = torch.rand(4, 1, 9, 9)
    torch.testing.assert_close(rotate_and_crop(images, 0.0, 0.0, torch.Generator()), images)


def test_a_rotation_turns_a_bar_about_the_middle() -> None:
    bar = torch.zeros(200, 1, 33, 33)
    bar[:, :, 16, 4:29] = 1
    turned = rotate_and_crop(bar, 30.0, 0.0, torch.Generator().manual_seed(0))
    rows, columns = torch.meshgrid(torch.arange(33.0) - 16, torch.arange(33.0) - 16, indexing="ij")
    angles = []
    for image in turned[:, 0]:
        xx, yy, xy = ((image * product).sum() for product in (columns**2, rows**2, rows * columns))
        angles.append(0.5 * math.degrees(math.atan2(2 * float(xy), float(xx - yy))))
    assert max(map(abs, angles)) < 31
    assert max(angles) > 25
    assert min(angles) < -25


def test_augmenting_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="this data has columns"):
        loop.start(Recipe("linear").with_settings({"data.name": "diabetes", "rotate": 5}), tmp_path / "run")


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


def test_the_folds_option_trains_them_all(tmp_path: Path) -> None:
    options = ("--set", "epochs=1", "--set", "threads=1", "--set", "data.limit=200")
    result = edgekit("train", "softmax", "--folds", 3, "-o", tmp_path / "folds", *options)
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "folds" / "folds.json").read_text())
    values = [Run.open(tmp_path / "folds" / f"fold-{number}").metrics["validation"] for number in (1, 2, 3)]  # type: ignore[index]
    assert summary["folds"] == values
    assert summary["mean"] == pytest.approx(np.mean(values))
    again = edgekit("train", "softmax", "--folds", 3, "-o", tmp_path / "folds", *options)
    assert again.returncode == 2
    assert "already exists" in again.stderr


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


# stopping


def broken_at(step: int, settings: TrainingSettings, tmp_path: Path) -> str:
    """What is said when the loss stops being a number at `step`."""
    run, parts = loop.start(recipe(), tmp_path / "run")
    network, _ = run.build()
    task = task_for(run, settings, {})
    stepper = Stepper(network, task, replace(settings, precision="float32"), Group(), steps_an_epoch=task.steps(parts.train))
    stepper.settings = settings
    losses, seen = task.losses, []

    def fail(module: nn.Module, batch: Any, state: Any) -> Any:
        (loss,), after = losses(module, batch, state)
        seen.append(loss)
        return ((loss * float("nan") if len(seen) == step else loss),), after

    task.losses = fail  # type: ignore[method-assign]
    with pytest.raises(loop.Diverged) as caught:
        stepper.run_epoch(parts.train, 0, lambda done, total: None)
    return str(caught.value)


def test_a_loss_that_is_not_finite_is_told_with_step_cause_and_fix(tmp_path: Path) -> None:
    plain = TrainingSettings(batch_size=64, threads=1)
    assert "became nan at step 1 (epoch 1), the very first: the data is not finite" in broken_at(1, plain, tmp_path / "a")
    later = broken_at(2, plain, tmp_path / "b")
    assert "at step 2 (epoch 1); likely the learning rate of 0.001 is too high" in later
    assert "--set training.learning_rate=0.0001, or bound the gradient with --set training.clip=1" in later
    assert "bound the gradient" not in broken_at(2, replace(plain, clip=1.0), tmp_path / "c")


def test_weights_that_the_last_step_broke_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(average: MovingAverage, module: Any, step: int) -> None:
        module.network.output.weight.data.fill_(math.nan)

    monkeypatch.setattr(MovingAverage, "update", spoil)  # what follows a step: its loss was still finite
    run, parts = loop.start(recipe(epochs=1, batch_size=0, ema=0.9), tmp_path / "run")
    with pytest.raises(loop.Diverged, match="became nan at step 1"):
        loop.train(run, parts, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_decoding_stops_at_the_last_position(tmp_path: Path) -> None:
    """Targets as long as the network has positions: an untrained network that never ends must be cut there."""
    rows = "".join(f"{'ab' * (n % 7 + 1)}{n}\t{' '.join('xy'[n >> k & 1] for k in range(9))}\n" for n in range(40))
    (tmp_path / "p.tsv").write_text("source\ttarget\n" + rows)
    settings = {"data.path": str(tmp_path / "p.tsv"), "network.width": 8, "network.heads": 2, "network.max_positions": 18}
    run, parts = loop.start(recipe("transformer", epochs=1, **settings), tmp_path / "run")
    run = loop.train(run, parts, tmp_path / "run")
    assert run.status == "complete"


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
