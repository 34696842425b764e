"""Attention: a weighted mean of values, where the weights say how well each key answers a query.

    weights = softmax(score(query, keys)),  context = Σᵢ weightsᵢ valuesᵢ

- additive scores, vᵀ tanh(W_q q + W_k k): Bahdanau, Cho and Bengio, "Neural machine translation by jointly learning to align
  and translate", 2015
- scaled dot products, q·k / √d, in several heads: Vaswani et al., "Attention is all you need", 2017

A mask is boolean and says which keys are visible. Where no key is visible (the rows of padding) the weights are uniform:
finite numbers that nobody reads, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.errors import OptionError

from .swappable import swappable


def hiding_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible and elsewhere a number so low that softmax gives exactly 0, yet finite even after a score is added."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min / 2)


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the last axis among the visible entries; `visible` is boolean and broadcasts to `scores`."""
    return torch.where(visible, scores, torch.finfo(scores.dtype).min / 2).softmax(dim=-1)  # see hiding_bias


def see_all(real: Tensor, time: int) -> Tensor:
    """A mask (batch, 1, time, keys) in which every query sees all real keys; `real` is (batch, keys)."""
    return real[:, None, None, :].expand(-1, 1, time, -1)


def see_earlier(real: Tensor, time: int) -> Tensor:
    """A mask (batch, 1, time, keys) in which the queries, the last `time` of the keys, see real keys up to themselves.

    Padding sees itself too, so that what it gives, though nobody reads it, does not depend on how a sequence is cut in pieces.
    """
    key = torch.arange(real.shape[1], device=real.device)
    query = key[real.shape[1] - time :, None]
    return ((key <= query) & real[:, None, None, :]) | (key == query)


class AdditiveAttention(nn.Module):
    """The keys' part of the score does not depend on the query: compute `project_keys` once for a source, not at every step."""

    def __init__(self, *, query_width: int, key_width: int, hidden: int) -> None:
        super().__init__()
        if min(query_width, key_width, hidden) < 1:
            raise OptionError(f"sizes must be 1 or more: query_width {query_width}, key_width {key_width}, hidden {hidden}")
        self.query = nn.Linear(query_width, hidden, bias=False)
        self.key = nn.Linear(key_width, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)

    def project_keys(self, memory: Tensor) -> Tensor:
        return self.key(memory)  # (batch, source, hidden)

    def forward(self, query: Tensor, projected_keys: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """query (batch, query_width), memory (batch, source, key_width), mask (batch, source), true where there is a token.

        Returns the context (batch, key_width) and the weights (batch, source).
        """
        hidden = torch.tanh(self.query(query).unsqueeze(1) + projected_keys)  # (batch, source, hidden)
        weights = masked_softmax(self.score(hidden).squeeze(-1), mask)  # (batch, source)
        context = (weights.unsqueeze(1) @ memory).squeeze(1)  # (batch, key_width)
        return context, weights


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (batch, time, width) → (batch, heads, time, head)


@swappable
def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Any,
    *,
    heads: int,
    past_keys: Tensor | None = None,
    past_values: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled dot-product attention with the keys and values of the past in front; every multi-head attention calls this.

    query (batch, time, width); keys and values (batch, new, width), or already split (batch, heads, new, head); past ones
    (batch, heads, past, head); visible (batch, 1, time, past + new). Returns the context, shaped as the query, and all keys and
    values so far, (batch, heads, past + new, head).
    """
    query = split_heads(query, heads)
    keys = split_heads(keys, heads) if keys.dim() == 3 else keys
    values = split_heads(values, heads) if values.dim() == 3 else values
    if past_keys is not None and past_values is not None:
        # under autocast the new ones are of lower precision than an empty past
        keys = torch.cat((past_keys.to(keys.dtype), keys), dim=2)  # (batch, heads, past + new, head)
        values = torch.cat((past_values.to(values.dtype), values), dim=2)
    bias = hiding_bias(visible, query.dtype)
    context = functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, dropout_p=dropout)
    return context.transpose(1, 2).flatten(2), keys, values


class MultiHeadAttention(nn.Module):
    """Attention in `heads` subspaces of the width.

    Self-attention is `attention(x, attention.key(x), attention.value(x), visible, past_keys, past_values)`; in cross-attention
    keys and values are those of another sequence, `attention.project(memory)`, computed once and given at every step.
    """

    def __init__(self, *, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if heads < 1 or width < 1 or width % heads:
            raise OptionError(f"width {width} cannot be divided into {heads} heads; set heads to a divisor of the width")
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (batch, heads, source, head) of memory (batch, source, width)."""
        return split_heads(self.key(memory), self.heads), split_heads(self.value(memory), self.heads)

    def forward(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Any,
        past_keys: Tensor | None = None,
        past_values: Tensor | None = None,
        *,
        keep: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`keep` takes those positions of the context that are of use to anyone."""
        context, keys, values = attend(
            self.query(x),
            keys,
            values,
            visible,
            heads=self.heads,
            past_keys=past_keys,
            past_values=past_values,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.output(keep(context) if keep else context), keys, values  # (batch, time, width)

    def weights(self, x: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        """The weights (batch, heads, time, keys) with which `forward` mixes values, before dropout."""
        query = split_heads(self.query(x), self.heads)
        return masked_softmax(query @ keys.transpose(2, 3) / math.sqrt(query.shape[-1]), visible)


@contextmanager
def collect_attention(network: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Within the block, the weights of every call to an attention module in `network`, by the module's name.

    Nothing else changes: the weights are computed beside the forward pass, from what went into it.
    """
    collected: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
            if isinstance(module, MultiHeadAttention):
                x, _, _, visible, *_ = inputs
                weights = module.weights(x, outputs[1], visible)
            else:
                weights = outputs[1]
            collected.setdefault(name, []).append(weights.detach())

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in network.named_modules()
        if isinstance(module, MultiHeadAttention | AdditiveAttention)
    ]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()
