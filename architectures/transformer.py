"""The Transformer (Vaswani et al., "Attention is all you need", 2017): an encoder and a decoder made of attention.

    encoder: x ← self-attention(x), feed-forward(x), in every layer, over the whole source
    decoder: y ← self-attention(y so far), attention(y → x), feed-forward(y), in every layer; logits = E y

Padding may stand on either side of a sequence; it is never attended to and does not count in positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.errors import OptionError

from .architecture import Architecture, DataFacts
from .layers.attention import see_all
from .layers.blocks import NORMS, BlockSizes, CrossAttentionBlock, SelfAttentionBlock, TokenHead, cache_names
from .layers.dropout import Dropout
from .layers.feedforward import ACTIVATIONS
from .layers.positions import POSITIONS, LearnedPositions, SinusoidalPositions, positions_of
from .layers.reading import choose, read
from .sequences import check_attention, check_choice, check_longest, check_sizes, token_spec


@dataclass(frozen=True)
class TransformerConfig:
    vocabulary: int = 64
    target_vocabulary: int = 64
    width: int = 256
    heads: int = 4
    encoder_layers: int = 3
    decoder_layers: int = 3
    feedforward: int = 1024
    dropout: float = 0.1
    activation: str = "relu"  # or gelu, gelu-tanh
    norm: str = "pre"  # or post
    positions: str = "sinusoidal"  # or learned
    max_positions: int = 512
    tied_output: bool = True  # logits are scored with the target's embedding
    shared_embeddings: bool = False  # source and target have one vocabulary and one embedding
    scaled_embeddings: bool = True  # by √width, as in the paper
    embedding_norm: bool = False  # BART's norm between embedding and first layer
    position_offset: int = 0  # unused rows before the first learned position, as in BART
    output_bias: bool = False
    pad: int = 0  # -1: no token is padding

    def __post_init__(self) -> None:
        check_attention(self)
        check_sizes(self, "vocabulary", "target_vocabulary", "encoder_layers", "decoder_layers")
        check_choice(self, "activation", ACTIVATIONS)
        check_choice(self, "norm", NORMS)
        check_choice(self, "positions", POSITIONS)
        if self.shared_embeddings and self.vocabulary != self.target_vocabulary:
            raise OptionError(
                f"shared_embeddings needs one vocabulary but the source has {self.vocabulary} tokens and the target "
                f"{self.target_vocabulary}; set network.shared_embeddings=false"
            )
        if self.position_offset < 0 or (self.position_offset and self.positions != "learned"):
            raise OptionError(
                f"position_offset is {self.position_offset}, expected 0, or more where positions=learned; "
                "set network.position_offset=0"
            )


class Placement(nn.Module):
    """Adds positions to embedded tokens: dropout(norm(scale · embedding + position))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        count, width = config.max_positions, config.width
        self.scale = math.sqrt(width) if config.scaled_embeddings else 1.0
        self.positions = (
            SinusoidalPositions(count=count, width=width)
            if config.positions == "sinusoidal"
            else LearnedPositions(count=count, width=width, offset=config.position_offset)
        )
        self.norm = nn.LayerNorm(width) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)

    def forward(self, embedded: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self.norm(embedded * self.scale + self.positions(positions)))  # (batch, time, width)


class Transformer(nn.Module):
    state_batch_axis = 0

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pad = config.pad
        self.heads = config.heads
        sizes = BlockSizes(
            width=config.width,
            heads=config.heads,
            feedforward=config.feedforward,
            activation=config.activation,
            norm=config.norm,
            dropout=config.dropout,
            inner_dropout=config.dropout,
        )
        self.source_embedding = nn.Embedding(config.vocabulary, config.width)
        self.target_embedding = None if config.shared_embeddings else nn.Embedding(config.target_vocabulary, config.width)
        self.source_placement = Placement(config)
        self.target_placement = Placement(config)
        self.encoder = nn.ModuleList(SelfAttentionBlock(sizes) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(CrossAttentionBlock(sizes) for _ in range(config.decoder_layers))
        ends_with_norm = config.norm == "pre"
        self.encoder_norm = nn.LayerNorm(config.width) if ends_with_norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(config.width) if ends_with_norm else nn.Identity()
        self.output = TokenHead(
            width=config.width, vocabulary=config.target_vocabulary, tied=config.tied_output, bias=config.output_bias
        )
        self.apply(_initialise)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("real", *cache_names(len(self.decoder)))

    @property
    def memory_names(self) -> tuple[str, ...]:
        return ("mask", *cache_names(len(self.decoder)))

    def encode(self, source: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """source (batch, source) → memory and the state before the first target token.

        memory: real (batch, source), then keys and values (batch, heads, source, head) for each decoder layer;
        state: real (batch, 0), then keys and values (batch, heads, 0, head) for each decoder layer.
        """
        real = source != self.pad  # (batch, source)
        visible = see_all(real, source.shape[1])
        x = self.source_placement(self.source_embedding(source), positions_of(real, source.shape[1]))
        for layer in self.encoder:
            x, _, _ = layer(x, visible)
        x = self.encoder_norm(x)  # (batch, source, width)
        memory, state = [real], [torch.zeros_like(real[:, :0])]
        for block in self.decoder:
            keys, values = cast(CrossAttentionBlock, block).cross_attention.project(x)
            memory += [keys, values]
            state += [torch.zeros_like(keys[:, :, :0]), torch.zeros_like(values[:, :, :0])]
        return tuple(memory), tuple(state)

    def decode(
        self, tokens: Tensor, memory: tuple[Tensor, ...], state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """tokens (batch, time) that follow the state → logits (batch, time, target_vocabulary) and the new state."""
        reading = read(tokens, self.pad, state[0])
        source_visible = see_all(memory[0], tokens.shape[1])  # (batch, 1, time, source)
        embedding = (self.target_embedding or self.source_embedding).weight
        x = self.target_placement(functional.embedding(reading.tokens, embedding), reading.positions)
        new_state = [reading.record]
        for index, layer in enumerate(self.decoder):
            of_layer = slice(1 + 2 * index, 3 + 2 * index)
            x, keys, values = layer(x, reading.visible, *state[of_layer], source_visible, *memory[of_layer])
            new_state += [keys, values]
        return self.output(choose(reading.restore(self.decoder_norm(x))), embedding), tuple(new_state)

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        """Logits (batch, time, target_vocabulary) for the token after each of `tokens`, which start with <bos>."""
        memory, state = self.encode(source)
        logits, _ = self.decode(tokens, memory, state)
        return logits


def _initialise(module: nn.Module) -> None:
    """Glorot's uniform weights, no biases, and embeddings that √width brings to unit variance."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)


def _adapt(config: TransformerConfig, data: DataFacts) -> TransformerConfig:
    check_longest(config, data)
    return replace(config, vocabulary=data.vocabulary, target_vocabulary=data.target_vocabulary)


def _variant(name: str, description: str, config: TransformerConfig) -> Architecture:
    return Architecture(
        name=name,
        description=description,
        tasks=("seq2seq",),
        config=config,
        build=Transformer,
        inputs=lambda config: (token_spec("source", "source"), token_spec("tokens", "time")),
        adapt=_adapt,
        takes=("tokens",),
        head=("target_embedding", "output"),
    )


_BASE = TransformerConfig(
    vocabulary=37_000,
    target_vocabulary=37_000,
    width=512,
    heads=8,
    encoder_layers=6,
    decoder_layers=6,
    feedforward=2048,
    norm="post",
    shared_embeddings=True,
)
TRANSFORMERS = (
    _variant("transformer", "Transformer, 3 and 3 pre-norm layers", TransformerConfig()),
    _variant("transformer-base", "Transformer of the paper, base size", _BASE),
    _variant(
        "transformer-large",
        "Transformer of the paper, big size",
        replace(_BASE, width=1024, heads=16, feedforward=4096, dropout=0.3),
    ),
)
