"""Sequence to sequence: learn a target given a source with teacher forcing; judge by what is decoded greedily.

Every accepted target of a source is a row to learn from. A decoded sequence counts against its nearest accepted target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from runtime.metrics import bleu, error_rate, word_error_rate
from runtime.text import BOS, EOS, PAD, pad_batch

from ...data.tokens import TokenPairs
from ..recipe import TrainingSettings
from .task import IGNORED, Batch, State, bucketed, device_of, in_order_of_length, row_count, token_loss

_EVALUATION_BATCH = 256
_QUICK_SOURCES = 1000


class Seq2SeqTask:
    metric = "per"
    higher_is_better = False

    def __init__(self, settings: TrainingSettings, *, positions: int | None) -> None:
        """`positions`: the most tokens the network can decode, None if there is no such limit."""
        self.settings = settings
        self.positions = positions

    def steps(self, part: TokenPairs) -> int:
        return -(-len(part.rows) // row_count(self.settings.batch_size, len(part.rows)))

    def batches(self, part: TokenPairs, generator: torch.Generator) -> Iterator[Batch]:
        for chosen in bucketed(part.row_lengths, row_count(self.settings.batch_size, len(part.rows)), generator):
            pairs = [part.rows[row] for row in chosen]
            source = torch.from_numpy(pad_batch([part.sources[source] for source, _ in pairs], eos=True))
            target = torch.from_numpy(pad_batch([target for _, target in pairs], bos=True, eos=True))
            wanted = target[:, 1:].masked_fill(target[:, 1:] == PAD, IGNORED)
            yield Batch((source, target[:, :-1]), (wanted,), (int((wanted != IGNORED).sum()),))

    def losses(self, module: nn.Module, batch: Batch, state: State | None) -> tuple[tuple[Tensor, ...], None]:
        return (token_loss(module(*batch.inputs), batch.targets[0], self.settings.label_smoothing),), None

    def evaluate(self, module: nn.Module, part: TokenPairs, *, quick: bool) -> dict[str, float]:
        part = part.some(_QUICK_SOURCES) if quick else part
        decoded = self.decode(module, part)
        score = bleu(
            [[str(token) for token in hypothesis] for hypothesis in decoded],
            [[[str(token) for token in target] for target in targets] for targets in part.targets],
        )
        return {
            "per": error_rate(decoded, part.targets),
            "wer": word_error_rate(decoded, part.targets),
            "bleu": score,
        }

    def decode(self, module: nn.Module, part: TokenPairs) -> list[list[int]]:
        limit = 2 * part.longest_target + 10
        return greedy(module, part.sources, limit=min(limit, self.positions or limit))


@torch.inference_mode()
def greedy(module: Any, sources: Sequence[Sequence[int]], *, limit: int) -> list[list[int]]:
    """The likeliest next token, again and again, until <eos> or `limit` tokens."""
    module.eval()
    device = device_of(module)
    lengths = np.array([len(source) for source in sources], dtype=np.int64)
    decoded: list[list[int]] = [[] for _ in sources]
    for rows in in_order_of_length(lengths, _EVALUATION_BATCH):
        source = torch.from_numpy(pad_batch([sources[row] for row in rows], eos=True)).to(device)
        for row, tokens in zip(rows.tolist(), _decode(module, source, limit), strict=True):
            ended = np.flatnonzero(tokens == EOS)
            decoded[row] = tokens[: ended[0] if len(ended) else None].tolist()
    return decoded


def _decode(module: Any, source: Tensor, limit: int) -> NDArray[Any]:
    memory, state = module.encode(source)
    token = torch.full((len(source), 1), BOS, dtype=torch.int64, device=source.device)
    done = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    chosen = []
    for _ in range(limit):
        logits, state = module.decode(token, memory, state)
        token = logits[:, -1:].argmax(-1)  # (batch, 1)
        chosen.append(token)
        done = done | (token[:, 0] == EOS)
        if bool(done.all()):
            break
    return torch.cat(chosen, dim=1).cpu().numpy()
