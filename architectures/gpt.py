"""GPT: a decoder alone, which predicts the next token (Radford et al., "Language models are unsupervised multitask learners",
2019, whose sizes the names gpt2 … gpt2-xl stand for).

    x = embedding + position;  x ← x + attention(norm(x)), x ← x + feed-forward(norm(x)), in every layer;  logits = E norm(x)

Learned positions, the tanh form of GELU, and the embedding E again as output. Padding may stand on either side of a sequence;
it is never attended to and does not count in positions. Past and new tokens together must fit into `max_positions`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .architecture import Architecture, DataFacts
from .layers.blocks import BlockSizes, SelfAttentionBlock, TokenHead, cache_names
from .layers.dropout import Dropout
from .layers.feedforward import ACTIVATIONS
from .layers.positions import LearnedPositions
from .layers.reading import choose, read
from .sequences import check_attention, check_choice, check_longest, check_sizes, token_spec


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int = 128
    width: int = 192
    heads: int = 6
    layers: int = 4
    feedforward: int = 768
    dropout: float = 0.2
    activation: str = "gelu-tanh"
    max_positions: int = 256
    pad: int = 0  # -1: no token is padding

    def __post_init__(self) -> None:
        check_attention(self)
        check_sizes(self, "vocabulary", "layers")
        check_choice(self, "activation", ACTIVATIONS)


class GPT(nn.Module):
    state_batch_axis = 0

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.pad = config.pad
        self.heads = config.heads
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = LearnedPositions(count=config.max_positions, width=config.width)
        self.dropout = Dropout(config.dropout)
        sizes = BlockSizes(
            width=config.width,
            heads=config.heads,
            feedforward=config.feedforward,
            activation=config.activation,
            norm="pre",
            dropout=config.dropout,
        )
        self.layers = nn.ModuleList(SelfAttentionBlock(sizes) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.output = TokenHead(width=config.width, vocabulary=config.vocabulary, tied=True, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """As GPT-2: deviation 0.02, and less where a layer adds to the residual stream, which 2 · layers terms feed."""
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.output.weight", "feedforward.contract.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * len(self.layers)) ** 0.5)
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("real", *cache_names(len(self.layers)))

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        """No tokens yet: real (batch, 0), then keys and values (batch, heads, 0, head) for each layer."""
        weight = self.embedding.weight
        empty = (batch, self.heads, 0, weight.shape[1] // self.heads)
        real = torch.zeros((batch, 0), dtype=torch.bool, device=weight.device)
        return (real, *(weight.new_zeros(empty) for _ in range(2 * len(self.layers))))

    def forward(self, tokens: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """tokens (batch, time) that follow the state → logits (batch, time, vocabulary) and the new state."""
        reading = read(tokens, self.pad, state[0])
        x = self.dropout(self.embedding(reading.tokens) + self.positions(reading.positions))  # (batch, time, width)
        new_state = [reading.record]

        def keep(x: Tensor) -> Tensor:
            return choose(reading.restore(x))

        for index, layer in enumerate(self.layers):
            is_last = index == len(self.layers) - 1
            x, keys, values = layer(x, reading.visible, *state[1 + 2 * index : 3 + 2 * index], keep=keep if is_last else None)
            new_state += [keys, values]
        return self.output(self.norm(x), self.embedding.weight), *new_state


def _adapt(config: GPTConfig, data: DataFacts) -> GPTConfig:
    check_longest(config, data)
    return replace(config, vocabulary=data.vocabulary, pad=0)


def _variant(name: str, description: str, config: GPTConfig) -> Architecture:
    return Architecture(
        name=name,
        description=description,
        tasks=("language-model",),
        config=config,
        build=GPT,
        inputs=lambda config: (token_spec(),),
        adapt=_adapt,
        takes=("tokens",),
        head=("embedding", "output"),
    )


def _gpt2(width: int, layers: int, heads: int) -> GPTConfig:
    return GPTConfig(
        vocabulary=50_257,
        width=width,
        heads=heads,
        layers=layers,
        feedforward=4 * width,
        dropout=0.1,
        max_positions=1024,
        pad=-1,  # GPT-2's own vocabulary has no padding
    )


GPTS = (
    _variant("gpt", "GPT, 4 layers for small vocabularies", GPTConfig()),
    _variant("gpt2", "GPT-2, 124 million parameters", _gpt2(768, 12, 12)),
    _variant("gpt2-medium", "GPT-2, 355 million parameters", _gpt2(1024, 24, 16)),
    _variant("gpt2-large", "GPT-2, 774 million parameters", _gpt2(1280, 36, 20)),
    _variant("gpt2-xl", "GPT-2, 1558 million parameters", _gpt2(1600, 48, 25)),
)
