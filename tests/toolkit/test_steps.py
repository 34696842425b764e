"""What a recipe can ask of a step: schedules, pieces, averages, precision, windows, augmentation, and a clear stop."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from architectures.layers.feedforward import FeedForward
from architectures.run_directory import Run
from runtime.errors import OptionError
from toolkit.training import loop, steps
from toolkit.training.augment import Augmentation, flip, rotate_and_crop
from toolkit.training.averaging import MovingAverage
from toolkit.training.distributed import Group
from toolkit.training.optimizers import make_optimizer
from toolkit.training.recipe import Recipe, TrainingSettings
from toolkit.training.schedules import Schedule
from toolkit.training.steps import Stepper
from toolkit.training.tasks import task_for
from toolkit.training.tasks.task import bucketed

from .tiny import largest_difference, recipe, train

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


@pytest.mark.parametrize("scheme", [None, "int8-static"])
def test_recomputing_blocks_gives_the_same_weights(
    scheme: str | None, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"data.path": str(text_file), "network.width": 16, "network.heads": 2, "network.layers": 2, "window": 16}
    settings |= {"quantize": scheme}
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


def test_bf16_is_refused_where_it_would_end_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_BF16_PRODUCT", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(OptionError, match=r"bf16 ends the process on this machine \(SIGILL.* set ONEDNN_MAX_CPU_ISA"):
        train(recipe("mlp", precision="bf16"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


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


# windows and buckets


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
