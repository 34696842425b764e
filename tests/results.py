"""`make results`: what the shared recipes reach, written to docs/results.md from the records of finished runs.

    python -m tests.results               the page again, from the records in docs/results/
    python -m tests.results --train runs  first train every recipe that has no finished run in the folder `runs`
                                          (hours), measure the baselines, and renew the records

A record is a run's run.json; with its recipe and seed in it, it is enough to train the same weights again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from architectures.catalog import find
from runtime.machine import describe_machine
from toolkit.console import note

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "results.md"
BASELINES = "baselines"

IMAGES = (
    "softmax",
    "mlp",
    "lenet",
    "alexnet-small",
    "vgg-small",
    "nin-small",
    "googlenet-small",
    "resnet-small",
    "densenet-small",
)
FASHION = ("resnet-small-fashion",)
QUANTITIES = ("linear", "kernel-regression")
PAIRS = ("seq2seq", "seq2seq-attention", "transformer")
LANGUAGE = ("rnn", "gru", "lstm", "gpt", "gpt-bpe")
SENTENCES = ("bert", "bert-classifier", "gru-classifier")
DECIMALS = {"bpc": 3, "mse": 0}
ALIGNED = "transformer"  # whose attention maps are shown
STARTS = {"bert-classifier": "bert"}  # fine-tuned from another run
ALL = (*IMAGES, *FASHION, *QUANTITIES, *PAIRS, *LANGUAGE, *SENTENCES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", metavar="FOLDER", help="train what has no finished run there yet")
    parser.add_argument("--only", metavar="RECIPE", nargs="*", default=ALL, help="of these recipes alone")
    options = parser.parse_args()
    if options.train:
        RECORDS.mkdir(exist_ok=True)
        for name in options.only:
            _record(name, Path(options.train))
        _write(BASELINES, measure_baselines())
    PAGE.write_text(page(read_records()), encoding="utf-8")
    note(f"written: {PAGE.relative_to(ROOT)}")


def read_records() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))}


def _record(name: str, folder: Path) -> None:
    from toolkit.training import loop
    from toolkit.training.recipe import load_recipe

    recipe = load_recipe(name)
    if name in STARTS:
        recipe = recipe.with_settings({"training.start": str(folder / STARTS[name])})
    directory = folder / name
    run, parts = loop.resume(directory, recipe) if (directory / "run.json").exists() else loop.start(recipe, directory)
    note(f"{name}: {'already trained' if run.status == 'complete' else 'training'}")
    loop.train(run, parts, directory, lambda epoch: note(f"{name} {epoch.number}/{epoch.total}  {epoch}"))
    record = json.loads((directory / "run.json").read_text())
    if name in STARTS:
        record["recipe"]["training"]["start"] = STARTS[name]  # without the folder it was in
    _write(name, record | {"machine": describe_machine()["cpu"]})
    if name == ALIGNED:
        shutil.copy(directory / "attention.png", RECORDS / "attention.png")


def measure_baselines() -> dict[str, Any]:
    """An n-gram model and logistic regression on the very splits that the networks had."""
    from toolkit.baselines import KneserNey, tfidf_accuracy
    from toolkit.data import docstrings, topics
    from toolkit.data.preparation import prepare
    from toolkit.data.text_data import split_texts
    from toolkit.training.recipe import load_recipe

    began = time.monotonic()
    data = topics.load()
    train, _, test = (part.stream for part in split_texts(data, load_recipe("lstm").data))
    found: dict[str, Any] = {
        "kneser_ney_bpc": KneserNey(order=6).fit(train).bits_per_character(test),
        "modified_kneser_ney_bpc": KneserNey(order=6, modified=True).fit(train).bits_per_character(test),
        "train_characters": len(train),
        "test_characters": len(test),
    }
    sentences, recipe = docstrings.load(), load_recipe("bert")
    parts = prepare(sentences, recipe.data, task="masked-lm", sentences=True)
    tokens = np.concatenate([np.array(row) for row in parts.test.sequences])
    known = np.concatenate([np.array(row) for row in parts.train.sequences])
    counts = np.bincount(known, minlength=len(parts.tokenizers["text"])) + 1.0  # one more, for tokens that are only tested
    found["unigram_nats"] = float(-np.log(counts[tokens] / counts.sum()).mean())
    found["tfidf_accuracy"] = tfidf_accuracy(sentences, load_recipe("bert-classifier").data).test
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def _write(name: str, record: dict[str, Any]) -> None:
    """One line a key: a record is for machines, and its history is long."""
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    (RECORDS / f"{name}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


# the page


def page(records: dict[str, Any]) -> str:
    """Markdown; every figure of a result is computed from `records`."""
    baselines = records.get(BASELINES, {})
    runs = {name: record for name, record in records.items() if name != BASELINES}
    machines = sorted({record["machine"] for record in runs.values()})
    parts = [
        "# What the recipes reach",
        "Written by `python -m tests.results` from the run records in [results/](results/); `make results` trains everything "
        "again first, which takes hours. All figures are on the test part, which was not used to choose weights or recipes "
        "unless a recipe's comment says so. Time is what training took on the wall clock, with validation after each epoch and "
        f"the threads given, mostly while another training ran on the other core ({', '.join(machines)}, 2 cores).",
        _section("Digits: 1,797 images of 8x8 pixels", runs, IMAGES, {"accuracy %": "accuracy"}),
        _section("Fashion-MNIST: 70,000 images of 28x28 pixels", runs, FASHION, {"accuracy %": "accuracy"}),
        _section("Diabetes: a quantity from 10 columns", runs, QUANTITIES, {"MSE": "mse", "R²": "r2"}),
        _section(
            "Letters to phonemes on cmudict, decoded greedily", runs, PAIRS, {"PER %": "per", "WER %": "wer", "BLEU": "bleu"}
        ),
        _alignment(runs),
        _section(
            "Language models of Python's help topics",
            runs,
            LANGUAGE,
            {"bits a character": "bpc", "perplexity a token": "perplexity"},
        ),
        _language_baseline(baselines),
        _section(
            "Docstring sentences",
            runs,
            SENTENCES,
            {
                "masked loss, nats": "masked_loss",
                "masked words told %": "masked_accuracy",
                "next sentence %": "next_sentence_accuracy",
                "accuracy %": "accuracy",
            },
        ),
        _sentence_baseline(baselines),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, runs: dict[str, Any], names: tuple[str, ...], columns: dict[str, str]) -> str:
    rows = []
    for name in names:
        if name not in runs:
            continue
        record = runs[name]
        details = record["metrics"]["details"]["test"]
        architecture = find(record["architecture"])
        cells = [f"{details[key]:.{DECIMALS.get(key, 2)}f}" if key in details else "" for key in columns.values()]
        threads = record["recipe"]["training"]["threads"]
        rows.append(
            [
                name,
                f"{architecture.parameters(architecture.configure(record['config'])):,}",
                *cells,
                str(record["metrics"]["epochs"]),
                _duration(record["metrics"]["seconds"]),
                str(threads),
            ]
        )
    if not rows:
        return ""
    header = ["recipe", "parameters", *columns, "epochs", "time", "threads"]
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] + ["---:"] * (len(header) - 1), *rows)]
    return "\n".join([f"## {title}", "", *lines])


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _alignment(runs: dict[str, Any]) -> str:
    if ALIGNED not in runs:
        return ""
    return f"What `{ALIGNED}` looks at while it spells, on validation words:\n\n![attention maps](results/attention.png)"


def _language_baseline(baselines: dict[str, Any]) -> str:
    if not baselines:
        return ""
    return (
        f"An interpolated Kneser–Ney 6-gram model of the same {baselines['train_characters']:,} characters needs "
        f"{baselines['kneser_ney_bpc']:.3f} bits a character on the same {baselines['test_characters']:,} characters "
        f"({baselines['modified_kneser_ney_bpc']:.3f} with modified discounts)."
    )


def _sentence_baseline(baselines: dict[str, Any]) -> str:
    if not baselines:
        return ""
    return (
        f"Tokens drawn by their frequency alone would have a loss of {baselines['unigram_nats']:.2f} nats. TF-IDF of words and "
        f"pairs of words with logistic regression tells the library of {baselines['tfidf_accuracy']:.2f} % of the same test "
        "sentences."
    )


if __name__ == "__main__":
    main()
