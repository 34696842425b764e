"""edgekit run on texts."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import runtime
from exporters.export import export
from exporters.source import find_source
from toolkit.cli import run

Shared = Callable[[str, Callable[[Path], object]], Path]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def prompt(text_file: Path) -> str:
    return text_file.read_text()[:12].replace("\n", " ").strip()


def lines_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


def test_one_text_is_streamed_and_is_what_generate_gives(gpt: Path, prompt: str, capsys: Captured) -> None:
    expected = runtime.load(gpt).generate(prompt, max_new_tokens=9)
    for stream in ("--stream", "--no-stream"):
        assert run(["run", str(gpt), "--text", prompt, "--max-new-tokens", "9", stream]) == 0
        assert capsys.readouterr().out == expected.text + "\n"


def test_n_best_with_scores_gives_a_line_for_each(gpt: Path, prompt: str, capsys: Captured) -> None:
    options = ["--beams", "3", "--n-best", "2", "--max-new-tokens", "4", "--set", "length_penalty=0"]
    assert run(["run", str(gpt), "--text", prompt, *options, "--scores", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    best, second = document["generations"]
    assert best["score"] >= second["score"]
    assert best["score"] == pytest.approx(sum(best["token_logprobs"]), abs=1e-4)
    assert run(["run", str(gpt), "--text", prompt, *options, "--scores"]) == 0
    assert f"{best['score']:.4f}  " in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("batch", ["1", "3"])
def test_stdin_answers_every_line_and_goes_on_after_a_bad_one(
    batch: str, gpt: Path, prompt: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runtime.load(gpt)
    lines_in(monkeypatch, f"{prompt}\n\n{prompt[:5]}\n")
    assert run(["run", str(gpt), "--stdin", "--max-new-tokens", "5", "--batch", batch]) == 2
    captured = capsys.readouterr()
    expected = [model.generate(text, max_new_tokens=5).text.replace("\n", "\\n") for text in (prompt, prompt[:5])]
    assert captured.out.split("\n") == [expected[0], "", expected[1], ""]
    assert "line 2: " in captured.err
    lines_in(monkeypatch, f"{prompt}\n\n")
    assert run(["run", str(gpt), "--stdin", "--max-new-tokens", "5", "--batch", batch, "--json"]) == 2
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["input"] == prompt
    assert second["input"] == ""
    assert "empty" in second["error"]


def test_a_seed_gives_the_same_text_again(gpt: Path, prompt: str, capsys: Captured) -> None:
    command = ["run", str(gpt), "--text", prompt, "--temperature", "1.5", "--max-new-tokens", "12"]
    texts = []
    for seed in ("1", "1", "2"):
        assert run([*command, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give exactly one of --text, --stdin and --input"),
        (["--text", "a", "--stdin"], "give exactly one of"),
        (["--text", "a", "--set", "beems=3"], "did you mean 'beams'"),
        (["--text", "a", "--set", "no_repeat_ngram=x"], "is not a value of no_repeat_ngram"),
        (["--text", "a", "--set", "stop_tokens=a"], "'a' is not a value of stop_tokens"),
        (["--text", "a", "--set", "speculate"], "has no value; write speculate=…"),
        (["--text", "a", "--n-best", "3"], "n_best=3 needs beams=3 or more"),
        (["--text", "a", "-o", "x.npz"], "-o saves raw outputs of --input"),
        (["--text", "\u2603"], "outside the vocabulary"),
        (["--text", ""], "empty"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_fix(arguments: list[str], message: str, gpt: Path, capsys: Captured) -> None:
    assert run(["run", str(gpt), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_options_of_every_kind_can_be_set(gpt: Path, prompt: str, capsys: Captured) -> None:
    given = [
        "no_repeat_ngram=2",
        "repetition_penalty=1.2",
        'stop=["q"]',
        "alternatives=2",
        "bad_words=z,zz",
        "speculate=true",
        "stop_tokens=3",
    ]
    command = ["run", str(gpt), "--text", prompt, "--max-new-tokens", "6", "--json"]
    assert run([*command, *(part for item in given for part in ("--set", item))]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["alternatives"][0]) == 2
    options = {"no_repeat_ngram": 2, "repetition_penalty": 1.2, "stop": ["q"], "bad_words": ["z", "zz"], "stop_tokens": [3]}
    assert document["text"] == runtime.load(gpt).generate(prompt, max_new_tokens=6, **options).text


def test_generation_options_are_refused_by_other_networks(shared: Shared, capsys: Captured, tmp_path: Path) -> None:
    bundle = (
        shared("tiny-mlp-run", lambda folder: export(find_source("mlp", {"input_shape": (4,)}), folder / "x.bundle"))
        / "x.bundle"
    )
    assert run(["run", str(bundle), "--text", "a", "--beams", "2"]) == 2
    assert "beams is for networks that generate" in capsys.readouterr().err
    np.savez(tmp_path / "x.npz", inputs=np.zeros((1, 4), np.float32))
    assert run(["run", str(bundle), "--text", "a"]) == 2
    assert "does not take text" in capsys.readouterr().err
