"""Training for a scheme: it wins back what rounding costs, resumes, and gives runs like any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from architectures.run_directory import Run
from exporters.fake_quantization import Blocks, Channels, attach
from runtime.errors import OptionError, UnknownName
from toolkit.cli import run
from toolkit.training import loop
from toolkit.training.plan import plan
from toolkit.training.recipe import Recipe, load_recipe, recipe_for

from .tiny import largest_difference, recipe, train, train_cut_and_resumed


@pytest.fixture
def regression(shared: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """A run that has learnt a smooth function with little noise: there rounding shows."""

    def make(folder: Path) -> None:
        import numpy as np
        from sklearn.datasets import make_friedman1

        columns, target = make_friedman1(2000, 10, noise=0.1, random_state=0)
        names = ",".join([*(f"x{number}" for number in range(columns.shape[1])), "y"])
        np.savetxt(folder / "rows.csv", np.column_stack([columns, target]), delimiter=",", header=names, comments="")
        settings = {"data.path": str(folder / "rows.csv"), "data.target": "y", "data.limit": None}
        settings |= {"network.hidden": "128,128", "epochs": 40, "schedule": "cosine", "learning_rate": 0.003}
        train(recipe(**settings), folder / "run")

    return shared("regression-run", make) / "run"


def test_fine_tuning_wins_back_what_four_bits_cost(regression: Path, tmp_path: Path) -> None:
    before = Run.open(regression)
    module, _ = before.load(regression)
    attach(module, "int4-weights")
    _, parts = plan(Recipe.from_json(before.recipe, "run.json"))
    rounded = float(((loop.predict(module, parts.test)[:, 0] - parts.test.targets) ** 2).mean())
    tuned = tmp_path / "tuned"
    train(recipe_for("int4-weights", str(regression)), tuned)
    after = Run.open(tuned)
    assert before.metrics is not None
    assert after.metrics is not None
    assert rounded > 1.05 * before.metrics["test"]  # far over the budget of 2 %
    assert after.metrics["test"] - before.metrics["test"] < 0.35 * (rounded - before.metrics["test"])


def test_the_weights_of_the_run_are_the_ones_the_scheme_stores(regression: Path, tmp_path: Path) -> None:
    """So that the metrics of the run are those of its quantized bundle, and exporting needs to know nothing."""
    weights = train(recipe_for("int4-weights", str(regression)), tmp_path / "tuned")
    assert weights.keys() == load_file(regression / "weights.safetensors").keys()
    matrix = weights["network.layers.3.weight"]
    assert torch.allclose(Blocks(4)(matrix), matrix, atol=1e-6)
    run = Run.open(tmp_path / "tuned")
    module, _ = run.load(tmp_path / "tuned")
    _, parts = plan(Recipe.from_json(run.recipe, "run.json"))
    mse = float(((loop.predict(module, parts.test)[:, 0] - parts.test.targets) ** 2).mean())
    assert run.metrics is not None
    assert mse == pytest.approx(run.metrics["test"], rel=1e-5)


def test_a_recipe_for_a_scheme_is_a_tenth_of_the_runs_own(regression: Path) -> None:
    chosen = recipe_for("int8-static", str(regression)).training
    assert (chosen.epochs, chosen.quantize, chosen.warmup) == (4, "int8-static", 0)
    assert chosen.learning_rate == pytest.approx(0.0003)
    assert chosen.start == str(regression.resolve())


@pytest.mark.parametrize(
    ("name", "scheme"), [("mlp", "int8-static"), ("lenet", "int8-static"), ("gpt", "int4-weights"), ("gpt", "int8-static")]
)
def test_a_cut_run_for_a_scheme_resumes_to_the_same_bits(
    name: str, scheme: str, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, object] = {"epochs": 3, "quantize": scheme, "ema": 0.9}
    if name == "gpt":
        settings |= {"data.path": str(text_file), "network.width": 32, "network.heads": 2, "window": 16, "data.limit": 60}
    else:
        settings |= {"data.name": "digits", "data.limit": 120}
    if name == "mlp":
        settings["network.hidden"] = "32,32"
    chosen = recipe(name, **settings)
    whole = train(chosen, tmp_path / "whole")
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", -1.0)
    assert largest_difference(whole, train_cut_and_resumed(chosen, tmp_path / "cut")) == 0


def test_training_for_a_scheme_changes_what_is_learnt(tmp_path: Path) -> None:
    plain = train(recipe(**{"network.hidden": "32"}), tmp_path / "plain")
    aware = train(recipe(quantize="int8-static", **{"network.hidden": "32"}), tmp_path / "aware")
    assert largest_difference(plain, aware) > 1e-3


def test_bf16_and_pieces_train_for_a_scheme_too(tmp_path: Path) -> None:
    for settings in ({"accumulate": 3}, {"precision": "bf16"}):
        train(recipe(quantize="int8-static", **settings, **{"network.hidden": "32"}), tmp_path / next(iter(settings)))


def test_what_cannot_be_trained_for_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="no scheme that a network can be trained for named 'int3'"):
        loop.start(recipe(quantize="int3"), tmp_path / "x")
    with pytest.raises(OptionError, match="int4-weights has nothing to quantize in this network"):
        loop.start(Recipe("softmax").with_settings({"data.name": "digits", "quantize": "int4-weights"}), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_run_and_a_recipe_are_not_mistaken_for_each_other(regression: Path) -> None:
    with pytest.raises(OptionError, match="is a run, not a recipe; fine-tune it for a scheme with --quantize NAME"):
        load_recipe(str(regression))
    with pytest.raises(OptionError, match="--quantize goes on from a finished run, and lenet is none"):
        recipe_for("int8-static", "lenet")


def test_the_command_fine_tunes_and_tells_what_was_before(
    regression: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(regression), "--quantize", "int4-weights", "--set", "epochs=2"]
    assert run([*command, "-o", str(tmp_path / "tuned")]) == 0
    assert "computed as int4-weights will; in float32, before: " in capfd.readouterr().out
    assert json.loads((tmp_path / "tuned" / "run.json").read_text())["recipe"]["training"]["epochs"] == 2


def test_a_network_on_text_learns_with_what_the_static_scheme_stores(tmp_path: Path, text_file: Path) -> None:
    settings = {"data.path": str(text_file), "network.width": 64, "network.heads": 2, "network.dropout": 0, "window": 16}
    weights = train(recipe("gpt", quantize="int8-static", **settings), tmp_path / "run")
    for name in ("embedding.weight", "layers.0.attention.query.weight"):
        assert torch.allclose(Channels(each=True)(weights[name]), weights[name], atol=1e-6), name


def test_folds_and_a_missing_run_are_refused_with_quantize(
    regression: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([str(regression), "--folds", "3"], ["--resume"]):
        assert run(["train", *arguments, "--quantize", "int4-weights", "-o", str(tmp_path / "x")]) == 2
        assert "--quantize goes on from one finished run" in capfd.readouterr().err


def test_recurrent_layers_stay_in_float32_and_that_is_said(
    tmp_path: Path, text_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"data.path": str(text_file), "network.hidden": 64, "window": 16}
    train(recipe("lstm", **settings), tmp_path / "run")
    command = ["train", str(tmp_path / "run"), "--quantize", "int4-weights", "--set", "epochs=1"]
    assert run([*command, "-o", str(tmp_path / "tuned")]) == 0
    said = capfd.readouterr().err
    assert "not trained for int4-weights, but in float32: " in said
    assert "recurrent.layers.0.0" in said
