"""Training learns, stops, resumes bit for bit, and keeps its promises about files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from architectures.run_directory import Run
from runtime.errors import DataError, EdgekitError, OptionError, OutputExists, SourceError, UnknownName
from toolkit.cli import run as command
from toolkit.data.dataset import DataSettings, split
from toolkit.data.diabetes import load as load_diabetes
from toolkit.training import loop
from toolkit.training.augment import shift
from toolkit.training.recipe import Recipe, load_recipe, recipe_names

from ..helpers import ROOT, environment

QUALITY = {"lenet": 98.0, "mlp": 96.0, "softmax": 96.0}


@pytest.mark.parametrize("name", QUALITY)
def test_classifiers_reach_their_accuracy_on_the_test_part(name: str, trained: Callable[[str], Path]) -> None:
    metrics = Run.open(trained(name)).metrics
    assert metrics is not None
    assert metrics["test"] >= QUALITY[name]


def test_linear_regression_matches_least_squares(trained: Callable[[str], Path]) -> None:
    run = Run.open(trained("linear"))
    module, _ = run.load(trained("linear"))
    data = load_diabetes()
    train = split(data, DataSettings()).train
    design = np.column_stack([train.inputs.astype(np.float64), np.ones(len(train))])
    solution, *_ = np.linalg.lstsq(design, train.targets.astype(np.float64), rcond=None)
    expected = np.column_stack([data.inputs.astype(np.float64), np.ones(len(data))]) @ solution
    actual = loop.predict(module, data)[:, 0]
    assert np.max(np.abs(actual - expected) / np.abs(expected)) < 1e-3


def small(**settings: object) -> Recipe:
    defaults = {"epochs": 3, "network.hidden": "16", "training.threads": 1}
    return load_recipe("mlp").with_settings(defaults | settings)


def run_all(recipe: Recipe, directory: Path) -> dict[str, torch.Tensor]:
    run, parts = loop.start(recipe, directory)
    loop.train(run, parts, directory)
    return load_file(directory / "weights.safetensors")


def assert_equal_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].numpy().tobytes() == right[name].numpy().tobytes(), name


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tmp_path: Path) -> None:
    first, second = run_all(small(), tmp_path / "a"), run_all(small(), tmp_path / "b")
    assert_equal_bits(first, second)
    other = run_all(small(seed=1), tmp_path / "c")
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_an_interrupted_run_resumes_to_the_same_bits(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small(epochs=6, optimizer=optimizer, schedule="cosine", shift=1)
    whole = run_all(recipe, tmp_path / "whole")
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", -1.0)
    run, parts = loop.start(recipe, tmp_path / "cut")

    def interrupt(epoch: loop.Epoch) -> None:
        if epoch.number == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.train(run, parts, tmp_path / "cut", interrupt)
    assert Run.open(tmp_path / "cut").status == "training"
    epochs: list[int] = []
    run, parts = loop.resume(tmp_path / "cut")
    loop.train(run, parts, tmp_path / "cut", lambda epoch: epochs.append(epoch.number))
    assert epochs == [4, 5, 6]  # the fourth had not been saved when it was cut off
    assert_equal_bits(whole, load_file(tmp_path / "cut" / "weights.safetensors"))
    files = sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert files == ["confusion.png", "curves.csv", "curves.png", "run.json", "weights.safetensors"]


def start_training(folder: Path, epochs: int = 16) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "toolkit",
            "train",
            "lenet",
            "-o",
            str(folder),
            "--set",
            f"epochs={epochs}",
            "--set",
            "threads=1",
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        # A shell has what it starts in the background ignore Ctrl-C, and children of that ignore it too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(path: Path) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} never appeared"
        time.sleep(0.05)


@pytest.mark.parametrize("moment", ["run.json", "checkpoint.safetensors"])
def test_a_killed_process_resumes_to_the_same_bits(moment: str, trained: Callable[..., Path], tmp_path: Path) -> None:
    whole = trained("lenet", epochs=16)
    process = start_training(tmp_path / "cut")
    wait_for(tmp_path / "cut" / moment)
    process.kill()
    process.wait()
    assert command(["train", "--resume", "-o", str(tmp_path / "cut")]) == 0
    assert_equal_bits(*(load_file(folder / "weights.safetensors") for folder in (whole, tmp_path / "cut")))


def test_ctrl_c_ends_with_130_and_says_how_to_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = start_training(tmp_path / "run")
    wait_for(tmp_path / "run" / "checkpoint.safetensors")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"edgekit train --resume -o {tmp_path / 'run'}" in errors
    assert "Traceback" not in errors
    assert command(["export", str(tmp_path / "run"), "-o", str(tmp_path / "x.bundle")]) == 2
    assert "has not finished" in capfd.readouterr().err
    for expected in ("on test", "already complete"):
        assert command(["train", "--resume", "-o", str(tmp_path / "run")]) == 0
        said = capfd.readouterr()
        assert expected in said.out + said.err


def test_two_trainings_in_one_directory_are_refused(tmp_path: Path) -> None:
    run, parts = loop.start(small(), tmp_path / "run")
    with loop._locked(tmp_path / "run"), pytest.raises(OutputExists, match="another training is running"):
        loop.train(run, parts, tmp_path / "run")


def test_force_does_not_harm_a_training_that_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = start_training(tmp_path / "live", epochs=5000)
    wait_for(tmp_path / "live" / "checkpoint.safetensors")
    before = (tmp_path / "live" / "run.json").read_bytes()
    code = command(["train", "softmax", "-o", str(tmp_path / "live"), "--force"])
    process.kill()
    process.wait()
    assert code == 2
    assert "another training is running" in capfd.readouterr().err
    assert (tmp_path / "live" / "run.json").read_bytes() == before
    assert (tmp_path / "live" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": -1}, "training.threads is -1"),
        ({"seed": 10**20}, "training.seed is 1e"),
        ({"learning_rate": "nan"}, "expected a number"),
        ({"weight_decay": float("nan")}, "expected a number"),
        ({"data.seed": -1}, "data.seed is -1"),
        ({"data.validation": 0.0001, "data.test": 0.9998}, "no rows of digits are left to train on"),
        ({"network.outputs": 3}, "network.outputs is 3, but digits needs 10; leave it out"),
        ({"momentum": 0.5}, "momentum is for sgd"),
        ({"data.image_size": 10**6}, "expected 1 to 4096"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_directory_is_made(settings: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(EdgekitError, match=message):
        loop.start(load_recipe("mlp").with_settings(settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_that_only_make_sense_together_can_be_set_together() -> None:
    recipe = load_recipe("mlp").with_settings({"data.test": "0.95", "data.validation": "0.04"})
    assert (recipe.data.test, recipe.data.validation) == (0.95, 0.04)


def test_early_stopping_and_the_best_weights(tmp_path: Path) -> None:
    recipe = small(epochs=200, patience=3, learning_rate=0.01, keep="best", schedule="constant")
    run, parts = loop.start(recipe, tmp_path / "run")
    run = loop.train(run, parts, tmp_path / "run")
    assert run.metrics is not None
    history = [entry["accuracy"] for entry in run.metrics["history"]]
    assert len(history) == run.metrics["epochs"] < 200
    assert run.metrics["best_epoch"] == int(np.argmax(history)) + 1 == len(history) - 3
    assert run.metrics["validation"] == max(history)


def test_an_existing_output_is_kept_unless_forced(tmp_path: Path) -> None:
    run_all(small(), tmp_path / "run")
    with pytest.raises(OutputExists, match="--force"):
        loop.start(small(), tmp_path / "run")
    loop.start(small(), tmp_path / "run", force=True)
    (tmp_path / "notes").mkdir()
    with pytest.raises(OutputExists, match="was not written by edgekit"):
        loop.start(small(), tmp_path / "notes", force=True)


def test_a_resumed_run_keeps_its_settings_and_its_data(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},{i * 2},{i % 2}" for i in range(40))
    (tmp_path / "d.csv").write_text(f"a,b,label\n{rows}\n")
    recipe = small(**{"data.path": str(tmp_path / "d.csv")})
    loop.start(recipe, tmp_path / "run")
    loop.resume(tmp_path / "run", recipe)
    with pytest.raises(OptionError, match="other settings"):
        loop.resume(tmp_path / "run", small(epochs=4))
    (tmp_path / "d.csv").write_text(f"a,b,label\n{rows}\n1,1,1\n")
    with pytest.raises(DataError, match="has changed since"):
        loop.resume(tmp_path / "run")
    with pytest.raises(OptionError, match="no run at"):
        loop.resume(tmp_path / "nowhere")


def test_a_loss_that_explodes_is_told_with_the_fix(tmp_path: Path) -> None:
    recipe = load_recipe("linear").with_settings({"learning_rate": 1e6, "epochs": 50})
    run, parts = loop.start(recipe, tmp_path / "run")
    with pytest.raises(OptionError, match=r"became \S+ at step \d+ \(epoch \d+\); likely the learning rate .*=100000"):
        loop.train(run, parts, tmp_path / "run")
    assert not (tmp_path / "run").exists()  # nothing stands in the way of the next try


def test_a_damaged_run_is_told(tmp_path: Path) -> None:
    run_all(small(), tmp_path / "run")
    weights = tmp_path / "run" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(SourceError, match="cannot be loaded"):
        Run.open(tmp_path / "run").load(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(SourceError, match="is damaged"):
        Run.open(tmp_path / "run")
    with pytest.raises(SourceError, match="not a run"):
        Run.open(tmp_path)


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    run, parts = loop.start(small(), tmp_path / "run")
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"junk")
    with pytest.raises(SourceError, match="is damaged"):
        loop.train(run, parts, tmp_path / "run")


def test_a_run_carries_no_path_of_this_machine_into_its_data_record(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},{i % 2}" for i in range(40))
    (tmp_path / "d.csv").write_text(f"a,label\n{rows}\n")
    run, _ = loop.start(small(**{"data.path": str(tmp_path / "d.csv")}), tmp_path / "run")
    assert "path" not in run.data
    assert str(tmp_path) not in json.dumps(run.data)


def test_columns_cannot_go_into_an_image_network(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},{i % 2}" for i in range(40))
    (tmp_path / "d.csv").write_text(f"a,label\n{rows}\n")
    with pytest.raises(DataError, match="takes images, but .*d.csv is a table"):
        loop.start(load_recipe("lenet").with_settings({"data.path": str(tmp_path / "d.csv")}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", recipe_names())
def test_shared_recipes_are_valid_and_described(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.description
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json())), name) == recipe


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('architecture = "lenett"', UnknownName, "did you mean 'lenet'"),
        ("[training]\nepochs = 3", OptionError, "names no architecture"),
        ('architecture = "mlp"\n[trainin]\nepochs = 3', UnknownName, "did you mean 'training'"),
        ('architecture = "mlp"\n[training]\nepoch = 3', UnknownName, "did you mean 'epochs'|did you mean 'training.epochs'"),
        ('architecture = "mlp"\n[training]\nepochs = "many"', OptionError, "expected a whole number"),
        ('architecture = "mlp"\n[training]\noptimizer = "adamm"', UnknownName, "did you mean 'adam"),
        ('architecture = "mlp"\n[training]\nepochs = 0', OptionError, r"training.epochs is 0, expected 1"),
        ("architecture = ", OptionError, "not valid TOML"),
    ],
)
def test_faults_of_a_recipe_are_told(text: str, error: type, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(error, match=message):
        load_recipe(str(tmp_path / "r.toml"))


def test_recipes_by_name_by_file_and_by_architecture(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('architecture = "lenet"\n[data]\nname = "digits"\n')
    assert load_recipe(str(tmp_path / "r.toml")).architecture == "lenet"
    with pytest.raises(UnknownName, match="did you mean 'lenet'"):
        load_recipe("lennet")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        load_recipe("nowhere.toml")


def test_shifting_moves_images_without_changing_them() -> None:
    images = torch.zeros(50, 1, 5, 5)
    images[:, 0, 2, 2] = 1
    moved = shift(images, 1, torch.Generator().manual_seed(0))
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(50))
    places = {tuple(index.tolist()) for index in moved[:, 0].nonzero()[:, 1:]}
    assert places == {(row, column) for row in (1, 2, 3) for column in (1, 2, 3)}
