"""Tiny encoder–decoders with attention that is far from even, and PyTorch's own account of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from architectures.layers.attention import collect_attention
from exporters.exportable import Exportable
from exporters.source import find_source

SIZES: dict[str, dict[str, Any]] = {
    "transformer": {"width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 2, "feedforward": 32},
    "seq2seq-attention": {"embedding": 8, "hidden": 12},
}
NAMES = tuple(SIZES)


def aligned_network(name: str, **options: Any) -> Exportable:
    """The same network each time. Its attention has opinions, and its logits too."""
    made = find_source(name, {"vocabulary": 20, "target_vocabulary": 18, **SIZES[name]}, **options)
    network = network_of(made)
    if name == "transformer":
        sharper = {layer.cross_attention.query: 6.0 for layer in network.decoder}
    else:
        attention = network.decoder.attention
        sharper = {attention.score: 20.0, attention.query: 6.0, attention.key: 8.0, network.output: 3.0}
    with torch.no_grad():
        for layer, factor in sharper.items():
            layer.weight.mul_(factor)
    return made


def network_of(made: Exportable) -> Any:
    assert made.generator is not None
    return made.generator.network


def attention_in_pytorch(network: Any, source: Any, fed: Any, layer: int = -1) -> NDArray[Any]:
    """Weights (batch, fed, source), by the hooks on the attention modules."""
    with torch.inference_mode(), collect_attention(network) as seen:
        network(torch.as_tensor(source), torch.as_tensor(fed))
    if "decoder.attention" in seen:
        return torch.stack(seen["decoder.attention"], dim=1).numpy()
    layers = sorted(name for name in seen if name.endswith("cross_attention"))
    return seen[layers[layer]][0].mean(dim=1).numpy()


def attention_of_text(network: Any, source: list[int], fed: list[int]) -> NDArray[Any]:
    """Weights (fed, source) of one text, fed alone."""
    return np.asarray(attention_in_pytorch(network, [source], [fed])[0])
