"""Language modelling: predict every token of a stream from those before it.

A recurrent network reads the stream in `batch_size` rows side by side, `window` tokens a step, and carries its state from
step to step while gradients stop at the window's edge: truncated back-propagation through time. A network with a limited
number of positions sees independent windows in random order instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runtime.metrics import bits_per_character, perplexity

from ...data.tokens import TokenStream
from ..recipe import TrainingSettings
from .task import Batch, State, device_of, token_loss

_EVALUATION_ROWS = 16
_QUICK_TOKENS = 100_000


class LanguageModelTask:
    metric = "bpc"
    higher_is_better = False

    def __init__(self, settings: TrainingSettings, *, positions: int | None) -> None:
        """`positions`: the most tokens the network can look at, None if it carries a state without end."""
        self.settings = settings
        self.positions = positions

    def steps(self, part: TokenStream) -> int:
        window, rows = self._window(part), self._rows(part)
        if self.positions is None:
            return max(1, ((len(part.ids) - 1) // rows - window // 2) // window)
        return max(1, -(-((len(part.ids) - 1 - window) // window) // rows))

    def batches(self, part: TokenStream, generator: torch.Generator) -> Iterator[Batch]:
        ids = torch.from_numpy(part.ids)
        rows, steps, window = self._rows(part), self.steps(part), self._window(part)
        offset = int(torch.randint(0, max(1, window // 2), (), generator=generator))  # other cuts in every epoch
        if self.positions is None:
            usable = (len(ids) - 1 - offset) // rows
            inputs = ids[offset : offset + rows * usable].view(rows, usable)
            targets = ids[offset + 1 : offset + 1 + rows * usable].view(rows, usable)
            pieces = ((inputs[:, at : at + window], targets[:, at : at + window]) for at in range(0, steps * window, window))
        else:
            starts = offset + window * torch.randperm((len(ids) - 1 - offset) // window, generator=generator)[: steps * rows]
            span = torch.arange(window)
            pieces = ((ids[at[:, None] + span], ids[at[:, None] + span + 1]) for at in starts.split(rows))
        for tokens, target in pieces:
            yield Batch((tokens,), (target,), (target.numel(),))

    def losses(self, module: nn.Module, batch: Batch, state: State | None) -> tuple[tuple[Tensor, ...], State | None]:
        (tokens,) = batch.inputs
        if state is None or self.positions is not None:
            state = network_of(module).initial_state(len(tokens))
        logits, *after = module(tokens, *state)
        carried = tuple(item.detach() for item in after) if self.positions is None else None
        return (token_loss(logits, batch.targets[0], self.settings.label_smoothing),), carried

    def evaluate(self, module: nn.Module, part: TokenStream, *, quick: bool) -> dict[str, float]:
        part = part.first(_QUICK_TOKENS) if quick else part
        nats = stream_nats(module, torch.from_numpy(part.ids), self.positions)
        tokens = max(1, len(part.ids) - 1)
        return {"bpc": bits_per_character(nats, part.characters), "perplexity": perplexity(nats, tokens)}

    def _window(self, part: TokenStream) -> int:
        return min(self.settings.window, max(2, (len(part.ids) - 1) // 2))

    def _rows(self, part: TokenStream) -> int:
        most = max(1, (len(part.ids) - 1) // self._window(part) - 1)
        return min(self.settings.batch_size or most, most)


def network_of(module: nn.Module) -> Any:
    """The network itself, where `module` is its distributed wrapper."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


@torch.inference_mode()
def stream_nats(module: Any, ids: Tensor, positions: int | None) -> float:
    """−Σ ln p of every token but the first.

    With a carried state the stream is read once from end to end. With limited positions each token is predicted from at
    least half as many before it, where there are that many.
    """
    module.eval()
    device = device_of(module)
    if positions is None:
        total, state = 0.0, module.initial_state(1)
        for tokens, targets in zip(ids[:-1].split(512), ids[1:].split(512), strict=True):
            logits, *state = module(tokens[None].to(device), *state)
            total += float(token_loss(logits, targets[None].to(device)))
        return total
    stride = max(1, positions // 2)
    first = ids[: positions + 1].to(device)
    logits, *_ = module(first[None, :-1], *module.initial_state(1))
    total = float(token_loss(logits, first[None, 1:]))
    # every later window of `positions` tokens adds `stride` new targets at its end
    ends = list(range(len(first) + stride, len(ids), stride))
    span = torch.arange(-positions - 1, 0)
    for group in torch.tensor(ends).split(_EVALUATION_ROWS) if ends else ():
        rows = ids[group[:, None] + span].to(device)  # (rows, positions + 1)
        logits, *_ = module(rows[:, :-1], *module.initial_state(len(rows)))
        total += float(token_loss(logits[:, -stride:], rows[:, -stride:]))
    done = ends[-1] if ends else len(first)
    if done < len(ids):
        rest = ids[max(0, len(ids) - positions - 1) :].to(device)
        left = len(ids) - done
        logits, *_ = module(rest[None, :-1], *module.initial_state(1))
        total += float(token_loss(logits[:, -left:], rest[None, -left:]))
    return total
