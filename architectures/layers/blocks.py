"""The repeated layers of Transformers: attention and a feed-forward network, each with a residual connection and a norm.

    post-norm (the 2017 paper, BERT): x ← norm(x + f(x))
    pre-norm (GPT-2, and steadier in training): x ← x + f(norm(x))

Dropout acts on every f(x) before it is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .attention import MultiHeadAttention
from .dropout import Dropout
from .feedforward import FeedForward

NORMS = ("pre", "post")


@dataclass(frozen=True)
class BlockSizes:
    width: int
    heads: int
    feedforward: int
    activation: str
    norm: str
    dropout: float
    inner_dropout: float = 0.0  # after the feed-forward network's activation
    epsilon: float = 1e-5


def cache_names(layers: int) -> tuple[str, ...]:
    """Names of the keys and values of every layer, in the order networks carry them: "0.key", "0.value", "1.key", …"""
    return tuple(f"{layer}.{part}" for layer in range(layers) for part in ("key", "value"))


class Sublayer(nn.Module):
    """The norm and the dropout around one f, in either order."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.pre_norm = sizes.norm == "pre"
        self.norm = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.dropout = Dropout(sizes.dropout)

    def before(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.pre_norm else x

    def after(self, x: Tensor, change: Tensor) -> Tensor:
        x = x + self.dropout(change)
        return x if self.pre_norm else self.norm(x)


def _attention(sizes: BlockSizes) -> MultiHeadAttention:
    return MultiHeadAttention(width=sizes.width, heads=sizes.heads, dropout=sizes.dropout)


def _feedforward(sizes: BlockSizes) -> FeedForward:
    return FeedForward(width=sizes.width, hidden=sizes.feedforward, activation=sizes.activation, dropout=sizes.inner_dropout)


class SelfAttentionBlock(nn.Module):
    """A layer of an encoder, of BERT or of GPT: the mask decides whether it looks ahead."""

    recomputable = True  # gradient checkpointing may run its forward again instead of keeping what is inside

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.attention = _attention(sizes)
        self.attention_sublayer = Sublayer(sizes)
        self.feedforward = _feedforward(sizes)
        self.feedforward_sublayer = Sublayer(sizes)

    def forward(
        self,
        x: Tensor,
        visible: Any,
        past_keys: Tensor | None = None,
        past_values: Tensor | None = None,
        keep: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x (batch, time, width) and all keys and values so far (batch, heads, past + time, head).

        `keep` is for the last layer: it takes the positions that are needed after it, and only those are computed once every
        position has been attended to.
        """
        y = self.attention_sublayer.before(x)
        y, keys, values = self.attention(
            y, self.attention.key(y), self.attention.value(y), visible, past_keys, past_values, keep=keep
        )
        x = self.attention_sublayer.after(keep(x) if keep else x, y)
        y = self.feedforward(self.feedforward_sublayer.before(x))
        return self.feedforward_sublayer.after(x, y), keys, values


class CrossAttentionBlock(nn.Module):
    """A layer of a decoder: self-attention, attention to the source, feed-forward."""

    recomputable = True

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.attention = _attention(sizes)
        self.attention_sublayer = Sublayer(sizes)
        self.cross_attention = _attention(sizes)
        self.cross_sublayer = Sublayer(sizes)
        self.feedforward = _feedforward(sizes)
        self.feedforward_sublayer = Sublayer(sizes)

    def forward(
        self,
        x: Tensor,
        visible: Any,
        past_keys: Tensor,
        past_values: Tensor,
        source_visible: Tensor,
        source_keys: Tensor,
        source_values: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As SelfAttentionBlock; the source's keys and values are `cross_attention.project(memory)`."""
        y = self.attention_sublayer.before(x)
        y, keys, values = self.attention(y, self.attention.key(y), self.attention.value(y), visible, past_keys, past_values)
        x = self.attention_sublayer.after(x, y)
        y = self.cross_sublayer.before(x)
        y, _, _ = self.cross_attention(y, source_keys, source_values, source_visible)
        x = self.cross_sublayer.after(x, y)
        y = self.feedforward(self.feedforward_sublayer.before(x))
        return self.feedforward_sublayer.after(x, y), keys, values


class TokenHead(nn.Module):
    """Logits over a vocabulary. Tied, it scores with the embedding it is given and has at most a bias of its own."""

    def __init__(self, *, width: int, vocabulary: int, tied: bool, bias: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(nn.init.xavier_uniform_(torch.empty(vocabulary, width)))
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if bias else None

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return functional.linear(x, embedding if self.weight is None else self.weight, self.bias)  # (batch, time, vocabulary)
