"""Letters → phonemes in PyTorch: our own networks, decoded step by step with their state in a plain loop.

What `make bench-generation` compares words per second with. The networks have the sizes of the shared recipes, and fresh
weights. Every word gets the same number of phonemes: <eos> is banned here, and unknown
to the bundle of an untrained network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.text import BOS, EOS

from .bench_ours import network_of
from .bench_peers import Job, check_count


class EagerTarget:
    """What a worker times: see runtime/bench_worker.py."""

    device = "cpu"

    def __init__(self, request: dict[str, Any]) -> None:
        from exporters.source import find_source

        torch.set_num_threads(request["threads"])
        self._job = Job(**request["job"])
        generator = find_source(*network_of(self._job.shape)).generator
        assert generator is not None
        self._network: Any = generator.network
        if hasattr(self._network, "_given"):  # weights that onnxruntime has side by side, and PyTorch would join at every step
            with torch.inference_mode():
                joined = self._network._given()
            self._network._given = lambda: joined
        self._one_by_one = request["one_by_one"]
        self.inputs = f"{self._job.batch} x {self._job.prompt} letters"

    def prepare(self, batch: int | None) -> Callable[[], None]:
        source = torch.from_numpy(self._job.prompts())
        decode = greedy if self._job.beams == 1 else beam_search
        pieces, job = (source.split(1), replace(self._job, batch=1)) if self._one_by_one else ((source,), self._job)

        def call() -> None:
            with torch.inference_mode():
                check_count(sum(decode(self._network, piece, job).numel() for piece in pieces), self._job)

        return call


def greedy(network: Any, source: Tensor, job: Job) -> Tensor:
    """The likeliest phoneme at every step, (batch, new tokens)."""
    memory, state = network.encode(source)
    tokens = source.new_full((job.batch, 1), BOS)
    made = []
    for _ in range(job.new_tokens):
        logits, state = network.decode(tokens, memory, state)
        logits[:, -1, EOS] = -torch.inf
        tokens = logits[:, -1:].argmax(-1)
        made.append(tokens)
    return torch.cat(made, dim=1)


def beam_search(network: Any, source: Tensor, job: Job) -> Tensor:
    """The best of `job.beams` sequences of equal length, (batch, new tokens)."""
    memory, state = network.encode(source)
    rows = torch.arange(job.batch).repeat_interleave(job.beams)
    memory = tuple(part.index_select(0, rows) for part in memory)
    state = _of_rows(network, state, rows)
    texts = source.new_full((job.batch * job.beams, 1), BOS)
    scores = torch.full((job.batch, job.beams), -torch.inf)
    scores[:, 0] = 0  # all beams are equal before the first token
    first = torch.arange(0, job.batch * job.beams, job.beams)[:, None]
    for _ in range(job.new_tokens):
        logits, state = network.decode(texts[:, -1:], memory, state)
        steps = logits[:, -1].log_softmax(-1).view(job.batch, job.beams, -1)
        steps[:, :, EOS] = -torch.inf
        scores, best = (scores[:, :, None] + steps).flatten(1).topk(job.beams)  # (batch, beams)
        rows = (first + best // steps.shape[2]).flatten()
        texts = torch.cat([texts[rows], (best % steps.shape[2]).view(-1, 1)], dim=1)
        state = _of_rows(network, state, rows)
    return texts[first[:, 0], 1:]  # topk sorts: each word's best is its first


def _of_rows(network: Any, state: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.index_select(network.state_batch_axis, rows) for part in state)


if __name__ == "__main__":
    from runtime.bench_worker import serve

    serve(EagerTarget)
