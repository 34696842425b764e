"""BERT: an encoder alone, pre-trained to fill in masked words (Devlin et al., "BERT: Pre-training of deep bidirectional
Transformers for language understanding", 2019).

    x = norm(token + segment + position);  post-norm layers of self-attention and feed-forward, over the whole text
    pooled = tanh(W x₀ + b), of the first token

What is returned depends on the configured task: "masked-lm" gives logits of every token and of whether the second segment
follows the first; "classification" gives logits of the classes, from the pooled token; "embedding" gives the mean of the
text's last hidden states, of length 1. Texts are padded on the right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn import functional

from .architecture import Architecture, DataFacts
from .layers.attention import see_all
from .layers.blocks import BlockSizes, SelfAttentionBlock, TokenHead
from .layers.dropout import Dropout
from .layers.feedforward import ACTIVATIONS, make_activation
from .layers.positions import LearnedPositions, positions_of
from .sequences import check_attention, check_choice, check_longest, check_sizes, token_spec

TASKS = ("masked-lm", "classification", "embedding")
EPSILON = 1e-12  # of every norm, as published


@dataclass(frozen=True)
class BERTConfig:
    task: str = "masked-lm"  # or classification, embedding
    vocabulary: int = 1024
    classes: int = 2
    segments: int = 2
    width: int = 128
    heads: int = 4
    layers: int = 4
    feedforward: int = 512
    dropout: float = 0.1
    activation: str = "gelu"
    max_positions: int = 128
    pad: int = 0  # -1: no token is padding

    def __post_init__(self) -> None:
        check_choice(self, "task", TASKS)
        check_attention(self)
        check_sizes(self, "vocabulary", "classes", "segments", "layers")
        check_choice(self, "activation", ACTIVATIONS)


class MaskedWordHead(nn.Module):
    """Logits of the words at every position, scored with the embedding: E norm(f(W x + b)) + c."""

    def __init__(self, *, width: int, vocabulary: int, activation: str) -> None:
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.activation = make_activation(activation)
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.output = TokenHead(width=width, vocabulary=vocabulary, tied=True, bias=True)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.output(self.norm(self.activation(self.transform(x))), embedding)  # (batch, time, vocabulary)


class BERT(nn.Module):
    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        width = config.width
        self.task = config.task
        self.pad = config.pad
        self.embedding = nn.Embedding(config.vocabulary, width)
        self.segment_embedding = nn.Embedding(config.segments, width)
        self.positions = LearnedPositions(count=config.max_positions, width=width)
        self.embedding_norm = nn.LayerNorm(width, eps=EPSILON)
        self.dropout = Dropout(config.dropout)
        sizes = BlockSizes(
            width=width,
            heads=config.heads,
            feedforward=config.feedforward,
            activation=config.activation,
            norm="post",
            dropout=config.dropout,
            epsilon=EPSILON,
        )
        self.layers = nn.ModuleList(SelfAttentionBlock(sizes) for _ in range(config.layers))
        self.pooler = nn.Linear(width, width)
        if config.task == "masked-lm":
            self.masked_words = MaskedWordHead(width=width, vocabulary=config.vocabulary, activation=config.activation)
            self.next_sentence = nn.Linear(width, 2)
        elif config.task == "classification":
            self.classifier = nn.Linear(width, config.classes)
        else:
            # Every task has the same features, whose weights it can take over; but nothing here trains the pooler.
            self.pooler.requires_grad_(False)
        self.apply(_initialise)

    def encode(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """tokens and segments (batch, time) → hidden states (batch, time, width)."""
        real = tokens != self.pad
        visible = see_all(real, tokens.shape[1])
        place = self.positions(positions_of(real, tokens.shape[1]))
        x = self.dropout(self.embedding_norm(self.embedding(tokens) + self.segment_embedding(segments) + place))
        for layer in self.layers:
            x, _, _ = layer(x, visible)
        return x

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """tokens and segments (batch, time) → see the task; masked-lm gives (batch, time, vocabulary) and (batch, 2)."""
        x = self.encode(tokens, segments)
        if self.task == "embedding":
            real = (tokens != self.pad).unsqueeze(-1).to(x.dtype)  # (batch, time, 1)
            mean = (x * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)  # (batch, width)
            return functional.normalize(mean, dim=-1)
        pooled = self.pooler(x[:, 0]).tanh()  # (batch, width)
        if self.task == "classification":
            return self.classifier(self.dropout(pooled))  # (batch, classes)
        return self.masked_words(x, self.embedding.weight), self.next_sentence(pooled)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _adapt(config: BERTConfig, data: DataFacts) -> BERTConfig:
    check_longest(config, data)
    classes = data.outputs if data.task == "classification" else config.classes
    return replace(config, task=data.task, vocabulary=data.vocabulary, classes=classes)


def _variant(name: str, description: str, config: BERTConfig) -> Architecture:
    return Architecture(
        name=name,
        description=description,
        tasks=TASKS,
        config=config,
        build=BERT,
        inputs=lambda config: (token_spec("tokens"), token_spec("segments")),
        adapt=_adapt,
        takes=("tokens",),
        head=("masked_words", "next_sentence", "classifier"),
    )


def _published(width: int, layers: int, heads: int) -> BERTConfig:
    return BERTConfig(vocabulary=30_522, width=width, heads=heads, layers=layers, feedforward=4 * width, max_positions=512)


BERTS = (
    _variant("bert", "BERT with 4 layers of width 128", BERTConfig()),
    _variant("bert-base", "BERT, base size of the paper", _published(768, 12, 12)),
    _variant("bert-large", "BERT, large size of the paper", _published(1024, 24, 16)),
)
