"""Tiny networks on text with their tokenizers, as bundles, and the same networks in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import runtime
from exporters.export import export
from exporters.exportable import Exportable
from exporters.fix import fix_sizes
from exporters.source import find_source
from runtime.text import Tokenizer, characters_of

Shared = Callable[[str, Callable[[Path], object]], Path]

LETTERS = characters_of("abcdefghijklmnop")  # 20 tokens
SENTENCES = characters_of("abcdefghijklm", specials=("<cls>", "<sep>", "<mask>"))  # 20 tokens

_SMALL = {"vocabulary": 20, "width": 16, "heads": 2, "feedforward": 32}
_RECURRENT = {"vocabulary": 20, "embedding": 8, "hidden": 8}
_PAIRS = {"vocabulary": 20, "target_vocabulary": 20}


@dataclass(frozen=True)
class Variety:
    """How a network is made: an architecture with settings, what is fixed in its graphs, and its tokenizers."""

    architecture: str
    settings: dict[str, Any]
    tokenizers: dict[str, Tokenizer]
    profile: str | None = None
    fixed: dict[str, int] | None = None
    scale: float = 4.0  # of the weights


_GPT = _SMALL | {"layers": 2, "max_positions": 64}
_BERT = _SMALL | {"layers": 1, "max_positions": 32}
_ONE, _TWO = {"text": LETTERS}, {"source": LETTERS, "target": LETTERS}

VARIETIES = {
    "gpt": Variety("gpt", _GPT, _ONE),
    "gpt-portable": Variety("gpt", _GPT, _ONE, "portable"),
    "gpt-without-padding": Variety("gpt", _GPT | {"pad": -1}, {}),
    "gpt-fixed": Variety("gpt", _GPT, _ONE, fixed={"batch": 2, "capacity": 16}),
    "gpt-by-four": Variety("gpt", _GPT, _ONE, fixed={"batch": 1, "time": 4}),
    "lstm": Variety("lstm", _RECURRENT, _ONE),
    "transformer": Variety(
        "transformer", _SMALL | _PAIRS | {"encoder_layers": 1, "decoder_layers": 1, "max_positions": 32}, _TWO, scale=1.5
    ),
    "seq2seq": Variety("seq2seq", _RECURRENT | _PAIRS, _TWO),
    "seq2seq-attention": Variety("seq2seq-attention", _RECURRENT | _PAIRS, _TWO),
    "seq2seq-without-tokenizer": Variety("seq2seq", _RECURRENT | _PAIRS, {}),
    "gru-classes": Variety("gru", _RECURRENT | {"task": "classification", "classes": 3}, _ONE),
    "bert-classes": Variety("bert", _BERT | {"task": "classification", "classes": 3}, {"text": SENTENCES}),
    "bert-fixed": Variety("bert", _BERT | {"task": "classification"}, {"text": SENTENCES}, fixed={"batch": 2, "time": 8}),
    "bert-vectors": Variety("bert", _BERT | {"task": "embedding"}, {"text": SENTENCES}),
    "bert-masked": Variety("bert", _BERT | {"task": "masked-lm"}, {"text": SENTENCES}),
}


def exportable(name: str) -> Exportable:
    """The same weights every time, large enough that no answer is near to uniform."""
    variety = VARIETIES[name]
    network = find_source(variety.architecture, variety.settings, profile=variety.profile)
    with torch.no_grad():
        for parameter in network.graphs[0].module.network.parameters():
            parameter.mul_(variety.scale)
    network = replace(network, tokenizers=variety.tokenizers)
    return fix_sizes(network, variety.fixed) if variety.fixed else network


def reference(name: str) -> Any:
    """The network in PyTorch."""
    return exportable(name).graphs[0].module.network.eval()


def text_model(shared: Shared, name: str) -> runtime.Model:
    folder = shared(f"text-{name}", lambda folder: export(exportable(name), folder / "x.bundle"))
    return runtime.load(folder / "x.bundle", threads=1)
