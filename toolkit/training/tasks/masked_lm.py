"""Masked language modelling with next-sentence prediction (Devlin et al., "BERT", 2019).

A row is `<cls> A <sep> B <sep>`: a text cut in two. In every second row B is the end of another text, and telling which is
the second loss. Of the other tokens 15 % are chosen; 80 % of these become <mask>, 10 % any token, 10 % stay, and all
chosen ones are to be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from runtime.text import PAD, Tokenizer, pad_batch

from ...data.dataset import spread
from ...data.tokens import TokenRows
from ..recipe import TrainingSettings
from .task import IGNORED, Batch, State, bucketed, device_of, row_count, token_loss

_SHARE = 0.15
_QUICK_ROWS = 2000


class MaskedLMTask:
    metric = "masked_loss"  # nats a masked token
    higher_is_better = False

    def __init__(self, settings: TrainingSettings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.cls, self.sep, self.mask = (tokenizer.token_id(name) for name in ("<cls>", "<sep>", "<mask>"))
        self.first_plain = max(self.cls, self.sep, self.mask) + 1
        self.vocabulary = len(tokenizer)

    def steps(self, part: TokenRows) -> int:
        return -(-len(part) // row_count(self.settings.batch_size, len(part)))

    def batches(self, part: TokenRows, generator: torch.Generator) -> Iterator[Batch]:
        for rows in bucketed(part.lengths, row_count(self.settings.batch_size, len(part)), generator):
            yield self._batch(part, rows, generator)

    def losses(self, module: nn.Module, batch: Batch, state: State | None) -> tuple[tuple[Tensor, ...], None]:
        logits, follows = module(*batch.inputs)
        tokens, real = batch.targets
        smoothing = self.settings.label_smoothing
        return (token_loss(logits, tokens, smoothing), functional.cross_entropy(follows.float(), real, reduction="sum")), None

    def evaluate(self, module: nn.Module, part: TokenRows, *, quick: bool) -> dict[str, float]:
        """On masks and pairs that are the same every time."""
        module.eval()
        device = device_of(module)
        generator = torch.Generator().manual_seed(0)
        looked_at = spread(len(part), _QUICK_ROWS if quick else len(part))
        loss = right = told = rows_seen = 0.0
        counted = 0
        with torch.inference_mode():
            for places in bucketed(part.lengths[looked_at], 256, generator):
                rows = looked_at[places]
                batch = self._batch(part, rows, generator).to(device)
                logits, follows = module(*batch.inputs)
                tokens, real = batch.targets
                loss += float(token_loss(logits, tokens))
                told += int((logits.argmax(-1) == tokens).sum())
                counted += batch.counts[0]
                right += int((follows.argmax(-1) == real).sum())
                rows_seen += len(rows)
        return {
            "masked_loss": loss / max(1, counted),
            "masked_accuracy": 100 * told / max(1, counted),
            "next_sentence_accuracy": 100 * right / max(1.0, rows_seen),
        }

    def _batch(self, part: TokenRows, rows: NDArray[np.int64], generator: torch.Generator) -> Batch:
        other = torch.randint(0, len(part), (len(rows),), generator=generator).tolist()
        real = torch.randint(0, 2, (len(rows),), generator=generator)
        pairs = [
            self._pair(part.sequences[row], part.sequences[row] if kept else part.sequences[stranger])
            for row, stranger, kept in zip(rows.tolist(), other, real.tolist(), strict=True)
        ]
        tokens = torch.from_numpy(pad_batch([first + second for first, second in pairs]))
        starts = torch.tensor([len(first) for first, _ in pairs])[:, None]
        segments = ((torch.arange(tokens.shape[1]) >= starts) & (tokens != PAD)).long()
        masked, targets = self._masked(tokens, generator)
        counts = (max(1, int((targets != IGNORED).sum())), len(rows))
        return Batch((masked, segments), (targets, real), counts)

    def _pair(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int]]:
        """`<cls> A <sep>` and `B <sep>`, each about half of the longest row that the network was fitted to."""
        return [self.cls, *first[: -(-len(first) // 2)], self.sep], [*second[-(-len(second) // 2) :], self.sep]

    def _masked(self, tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        plain = tokens >= self.first_plain
        chosen = plain & (torch.rand(tokens.shape, generator=generator) < _SHARE)
        draw = torch.rand(tokens.shape, generator=generator)
        strange = torch.randint(self.first_plain, self.vocabulary, tokens.shape, generator=generator)
        shown = torch.where(chosen & (draw < 0.8), torch.tensor(self.mask), tokens)
        shown = torch.where(chosen & (draw >= 0.8) & (draw < 0.9), strange, shown)
        return shown, tokens.masked_fill(~chosen, IGNORED)
