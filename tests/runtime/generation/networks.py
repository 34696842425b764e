"""Tiny generating networks with their bundles: every one of the catalogue, at sizes of a second.

That a graph equals its network is proved where it is exported; here the graphs are only traced, and what is tested is what the
runtime makes of them.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import runtime
from architectures.catalog import CATALOG
from exporters.export import GraphProof, write_proofs
from exporters.exportable import Exportable, Generator
from exporters.graph import signature_of
from exporters.profiles import PROFILES
from exporters.source import find_source
from exporters.trace import model_of, trace
from runtime.bundle import Tolerance
from runtime.generation.options import Generation
from runtime.model import Model
from runtime.text import BOS, EOS, PAD, SPECIALS, Tokenizer

from .quantized import DYNAMIC, FP16, FP32, INT8, MANY_ROWS, as_stored

LETTERS = "abcde"
TOKENIZER = Tokenizer("characters", (*SPECIALS, *LETTERS))
VOCABULARY = len(TOKENIZER)
FIRST_LETTER = len(SPECIALS)
POSITIONS = 64
SIZES: dict[str, Any] = {
    "vocabulary": VOCABULARY, "target_vocabulary": VOCABULARY, "width": 16, "heads": 2, "layers": 1, "encoder_layers": 1,
    "decoder_layers": 1, "feedforward": 16, "max_positions": POSITIONS, "embedding": 8, "hidden": 12, "output_bias": True,
    "tied_output": False, "scaled_embeddings": False,
}  # fmt: skip
SMALL = 6_000_000  # parameters; larger ones are published sizes of the same networks
ROOM = 10  # tokens that are generated
SEED = 8  # of the weights
NOISE = 1e-5  # that logits of these sizes may have
SAME = 10 * NOISE  # within which log-probabilities are the same: they are sums, and several texts away from each other


def attends(name: str) -> bool:
    """Whether a network has a cache, which comes in two profiles; a hidden state is the same in both."""
    return any(item.name == "heads" for item in fields(CATALOG[name].config))


def generating(*tasks: str) -> list[tuple[str, str]]:
    """(name, profile) of all there is in the catalogue, or of those with certain tasks."""
    found = []
    for name, entry in CATALOG.items():
        if entry.task in (tasks or ("language-model", "seq2seq")) and entry.parameters() < SMALL:
            found += [(name, profile) for profile in (PROFILES if attends(name) else PROFILES[:1])]
    return found


DIES_IN_HALF_PRECISION = ("seq2seq-attention",)  # onnxruntime, while it loads an encoder that reads in both directions


def has_laws(name: str, precision: str) -> bool:
    """Whether a network has a bundle of its own in this precision. It has none for two reasons (test_quantized_laws.py): half
    precision is refused, or int8-dynamic is int8-weights in its form for many rows, as it is without recurrent layers."""
    return name not in DIES_IN_HALF_PRECISION if precision == FP16 else precision != DYNAMIC or not attends(name)


@dataclass(frozen=True)
class Tiny:
    """A network, and the model that was made of it."""

    about: Generator
    model: Model
    precision: str = FP32

    @property
    def is_language_model(self) -> bool:
        return self.about.source_vocabulary is None

    @property
    def can_rewind(self) -> bool:
        return self.model._generator.decoder.can_rewind

    @cached_property
    def noise(self) -> float:
        """What log-probabilities may differ by that are the same but for the order of computing. In half precision another
        order rounds to other numbers, which may be as far off as PyTorch's. Where activations are rounded to int8, those of a
        row are rounded alike wherever it stands, so that float32's noise is what is left."""
        return self._error_of_half_precision() if self.precision == FP16 else SAME

    def _error_of_half_precision(self) -> float:
        """The largest that PyTorch makes at a thousand places when it computes with the same weights in half precision."""
        random = torch.Generator().manual_seed(SEED)
        tokens = torch.randint(FIRST_LETTER, VOCABULARY, (64, 16), generator=random)
        source = None if self.is_language_model else torch.randint(FIRST_LETTER, VOCABULARY, (64, 7), generator=random)
        with as_stored(self.about.network, self.precision, reading=True):
            exact = self.about.logits(tokens, source).log_softmax(-1)
            half = self.about.logits(tokens, source, network=copy.deepcopy(self.about.network).half())
        return float((half.float().log_softmax(-1) - exact).abs().max())

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """(tokens + 1, vocabulary): PyTorch's log-probabilities after the prompt, and after each of the tokens that follow."""
        given = [*prompt] if self.is_language_model else [BOS]
        source = None if self.is_language_model else torch.tensor([list(prompt)])
        if self.precision == INT8:
            logits = self._in_two_forms(torch.tensor([given]), torch.tensor([list(tokens)], dtype=torch.long), source)
        else:
            with as_stored(self.about.network, self.precision, reading=True):
                logits = self.about.logits(torch.tensor([[*given, *tokens]]), source)
        return logits[0, -len(tokens) - 1 :].log_softmax(dim=-1)

    @torch.inference_mode()
    def _in_two_forms(self, given: Tensor, tokens: Tensor, source: Tensor | None) -> Tensor:
        """Logits of a prompt in the form that reads, going on from its state in the form that writes; what an encoder–decoder
        is given is its source, and all tokens are written."""
        network = self.about.network
        with as_stored(network, self.precision, reading=True):
            if source is None:
                read, *state = network(given, *network.initial_state(1))
            else:
                memory, state = network.encode(source)
        with as_stored(network, self.precision, reading=False):
            if source is not None:
                return network.decode(torch.cat((given, tokens), dim=1), memory, state)[0]
            return torch.cat((read, network(tokens, *state)[0]), dim=1) if tokens.shape[1] else read

    def rescored(self, prompt: Sequence[int], found: Generation) -> list[float]:
        """PyTorch's log-probabilities of a generated text, of its <eos> too."""
        tokens = [*found.tokens, *([EOS] if found.finish == "eos" else [])]
        scores = self.logprobs(prompt, tokens)
        return [float(scores[place, token]) for place, token in enumerate(tokens)]

    def assert_same(self, actual: Any, expected: Any) -> None:
        assert_same(actual, expected, self.noise)


def network(
    name: str, profile: str | None, tokenizer: Tokenizer = TOKENIZER, *, ending: float = 0.2, attention: bool = False
) -> Exportable:
    """With weights so large that every token depends on those before it. <eos> is the likeliest token in the share `ending` of
    all places."""
    known = {item.name for item in fields(CATALOG[name].config)}
    sizes = SIZES | {"vocabulary": len(tokenizer), "target_vocabulary": len(tokenizer)}
    source = find_source(
        name, {key: value for key, value in sizes.items() if key in known}, profile=profile, attention=attention
    )
    assert source.generator is not None
    random = torch.Generator().manual_seed(SEED)
    for parameter in source.generator.network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.8, generator=random)
    make_endings_likely(source.generator, ending, random)
    kinds = ("text",) if source.generator.source_vocabulary is None else ("source", "target")
    return replace(source, tokenizers=dict.fromkeys(kinds, tokenizer))


def make_endings_likely(about: Generator, share: float, random: torch.Generator) -> None:
    bias = output_bias(about.network)
    bias[EOS] = 0.0
    tokens = torch.randint(FIRST_LETTER, about.vocabulary, (64, 8), generator=random)
    source = torch.randint(FIRST_LETTER, about.vocabulary, (64, 5), generator=random)
    logits = about.logits(tokens, source if about.source_vocabulary else None)
    others = logits.clone()
    others[..., [PAD, EOS]] = -torch.inf
    behind = (others.amax(dim=-1) - logits[..., EOS]).flatten().sort().values
    nearby = behind[int(0.8 * share * len(behind)) : int(1.2 * share * len(behind))]
    widest = int(nearby.diff().argmax())  # in the middle of a gap, so that no two tokens are equally likely
    bias[EOS] = float(nearby[widest : widest + 2].mean())


def output_bias(module: Any) -> Tensor:
    """What is added to the logits."""
    bias = getattr(module.output, "bias", None)
    if bias is not None:
        return bias.data  # type: ignore[no-any-return]
    # Without a bias: where the last norm gives a constant, its column of the embedding is one.
    with torch.no_grad():
        module.norm.weight[0], module.norm.bias[0] = 0.0, 1.0
    return module.embedding.weight.data[:, 0]  # type: ignore[no-any-return]


def write(source: Exportable, target: Path) -> None:
    """The bundle of a network, without the proof."""
    assert source.generator is not None
    proofs = []
    with tempfile.TemporaryDirectory() as folder:
        for graph in source.graphs:
            model = model_of(trace(graph, source.name, opset=20), graph, Path(folder))
            tolerance = {"logits": Tolerance(NOISE, NOISE, "given")} if graph.name == "decoder" else {}
            proofs.append(GraphProof(graph.name, model, signature_of(model, graph.states), (), tolerance, ()))
        pad = source.generator.pad
        write_proofs(
            target,
            proofs,
            name=source.name,
            task=source.task,
            lineage=({"step": "test"},),
            tokenizers=source.tokenizers,
            generation={"bos": BOS, "eos": EOS, "pad": None if pad < 0 else pad, "longest": source.generator.longest},
            force=True,
        )


def opened(source: Exportable, bundle: Path, precision: str = FP32) -> Tiny:
    assert source.generator is not None
    model = runtime.load(bundle, device="cpu", threads=1, many_rows=precision == MANY_ROWS)
    return Tiny(source.generator, model, precision)


def prompts(count: int, *, longest: int = 7, seed: int = 0) -> list[list[int]]:
    """Ragged ones of letters."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=random).tolist()
    return [torch.randint(FIRST_LETTER, VOCABULARY, (length,), generator=random).tolist() for length in lengths]


def flat(found: Any) -> list[Generation]:
    return list(found) if isinstance(found, list) else [found]


def assert_same(actual: Any, expected: Any, noise: float = SAME) -> None:
    """The same texts with the same scores, up to the rounding of another batch."""
    assert [(item.tokens, item.text, item.finish) for item in flat(actual)] == [
        (item.tokens, item.text, item.finish) for item in flat(expected)
    ]
    for one, other in zip(flat(actual), flat(expected), strict=True):
        assert one.score == pytest.approx(other.score, abs=noise)
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=noise)


def some_of(cases: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """The fixture `tiny` for these networks only."""
    return pytest.mark.parametrize("tiny", cases, indirect=True, ids="-".join)
