"""The weights with which a decoder looks at its source, as a graph of their own: `edgekit export … --attention`.

Transformer    tokens (batch, time), memory.* → attention (batch, time, source): the mean over the heads of the last layer's
               attention to the source, for a whole text at once. The last layer's values do not matter and are no input.
Bahdanau       tokens (batch, 1), memory.*, past.* → attention (batch, 1, source), present.*: the weights of one step.

Fused operators do not give their weights, so this graph is of standard operators in every profile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from architectures.layers.attention import attend, masked_softmax, split_heads
from architectures.layers.recurrent import PAD
from architectures.seq2seq import AttentionSeq2Seq
from architectures.transformer import Transformer

ATTENTION = "attention"  # the output


def looks_at_its_source(network: nn.Module) -> bool:
    return isinstance(network, Transformer | AttentionSeq2Seq)


def alignment_of(network: nn.Module) -> nn.Module:
    """The network as it gives its attention to the source."""
    return AdditiveAlignment(network) if isinstance(network, AttentionSeq2Seq) else TransformerAlignment(network)


class TransformerAlignment(nn.Module):
    """tokens, mask, keys and values of the source for every layer but the last one's values → attention."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, *memory: Tensor) -> Tensor:
        recorded: list[Tensor] = []

        def recording(
            query: Tensor, keys: Tensor, values: Tensor, visible: Any, *, heads: int, past_keys: Any = None, **ignored: Any
        ) -> tuple[Tensor, Tensor, Tensor]:
            if past_keys is not None:  # self-attention: the past is empty
                return attend.plain(query, keys, values, visible, heads=heads)
            split = split_heads(query, heads)
            weights = masked_softmax(split @ keys.transpose(2, 3) / math.sqrt(split.shape[-1]), visible)
            recorded.append(weights)
            return (weights @ values).transpose(1, 2).flatten(2), keys, values

        keys = memory[-1]  # in place of the last layer's values, which only logits would need
        mask, *caches = memory = (*memory, keys)
        empty = torch.zeros_like(mask[:, :0]), *(torch.zeros_like(cache[:, :, :0]) for cache in caches)
        with attend.replaced_by(recording):
            self.network.decode(tokens, memory, empty)
        return recorded[-1].mean(dim=1)  # (batch, time, source)


class AdditiveAlignment(nn.Module):
    """tokens, memory, state → attention, new state. Padding changes no state."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        count = len(self.network.memory_names)
        memory, state = others[:count], others[count:]
        recorded: list[Tensor] = []
        watch = self.network.decoder.attention.register_forward_hook(lambda module, given, made: recorded.append(made[1]))
        try:
            _, after = self.network.decode(tokens, memory, state)
        finally:
            watch.remove()
        real = (tokens != PAD).view(1, -1, 1)  # states are (layers, batch, hidden)
        return recorded[0].unsqueeze(1), *(torch.where(real, new, old) for new, old in zip(after, state, strict=True))
