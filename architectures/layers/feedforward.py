"""The position-wise network of a Transformer: W₂ f(W₁ x + b₁) + b₂, the same at every position.

f is ReLU, max(0, x), or GELU, x Φ(x) (Hendrycks and Gimpel, 2016); "gelu-tanh" is its approximation in GPT-2,
½ x (1 + tanh(√(2/π) (x + 0.044715 x³))).
"""

from __future__ import annotations

from torch import Tensor, nn

from runtime.errors import UnknownName

from .dropout import Dropout

ACTIVATIONS = ("relu", "gelu", "gelu-tanh")


def make_activation(name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise UnknownName.of("activation", name, ACTIVATIONS)
    if name == "relu":
        return nn.ReLU()
    return nn.GELU(approximate="tanh" if name == "gelu-tanh" else "none")


class FeedForward(nn.Module):
    def __init__(self, *, width: int, hidden: int, activation: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.activation = make_activation(activation)
        self.dropout = Dropout(dropout)
        self.contract = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.dropout(self.activation(self.expand(x))))  # (batch, time, width)
