"""What the benchmark of generation reports, without timing anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from exporters.export import export
from exporters.source import find_source
from runtime.bench_worker import Variant
from runtime.text import BOS, EOS

from . import bench_generation
from .bench_generation import OURS, Contest, Result, contests, hold
from .bench_host import nodes_of_a_step
from .bench_letters import beam_search, greedy
from .bench_peers import FP32, INT8, PEERS, Job, check_count

TOKENS = Contest("A", "greedy", FP32, Job("A", 1, 32, 100), 0.95)
FIRST_TOKEN = Contest("A", "first-token-512", FP32, Job("A", 1, 512, 1), 1.0)


def test_the_best_peer_is_the_fastest_and_the_ratio_is_ours_to_its_tokens() -> None:
    row = Result(TOKENS, {OURS: 2.0, "slow": 8.0, "fast": 4.0}, {}).to_json()
    assert row == {
        "shape": "A", "mode": "greedy", "precision": "fp32", "ours": 50.0, "peer": 25.0, "best_peer": "fast", "ratio": 2.0,
    }  # fmt: skip


def test_a_time_to_the_first_token_is_in_ms_and_larger_ratios_are_better_still() -> None:
    row = Result(FIRST_TOKEN, {OURS: 0.5, "peer": 1.0}, {}).to_json()
    assert row is not None
    assert (row["ours"], row["peer"], row["ratio"]) == (500.0, 1000.0, 2.0)


def test_a_missed_goal_is_said() -> None:
    assert "MISSED" in next(Result(TOKENS, {OURS: 2.0, "peer": 1.0}, {}).lines())
    assert "MISSED" not in next(Result(TOKENS, {OURS: 1.0, "peer": 1.0}, {}).lines())


def test_who_cannot_be_opened_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = {"shape": "A", "batch": 1, "prompt": 2, "new_tokens": 1}

    def one(*arguments: Any) -> Iterator[Any]:
        yield OURS, lambda: Variant(OURS, "tests.bench_ours", {"bundle": str(tmp_path / "absent.bundle"), "job": job})

    monkeypatch.setattr(bench_generation, "contestants", one)
    result = hold(TOKENS, tmp_path, None, rounds=1)
    assert result.to_json() is None
    assert "absent.bundle" in result.left_out[OURS]
    assert any("left out: " in line and "absent.bundle" in line for line in result.lines())


def test_who_makes_fewer_tokens_is_refused() -> None:
    with pytest.raises(RuntimeError, match="it made 9 tokens, expected 10"):
        check_count(9, Job("A", 2, 3, 5))


def test_every_contest_of_shapes_a_and_b_has_a_peer() -> None:
    of_peers = [contest for contest in contests() if contest.shape in "AB"]
    assert len(of_peers) == 15
    for contest in of_peers:
        assert any(peer.takes(contest.job, contest.precision) for peer in PEERS), str(contest)


def test_a_peer_without_beam_search_takes_no_beams() -> None:
    names = {peer.name for peer in PEERS if peer.takes(Job("A", 1, 32, 8, beams=4), INT8)}
    assert names == {"CTranslate2 int8"}


def test_of_a_stand_in_it_is_said_and_the_fastest_on_the_network_itself_too() -> None:
    lines = list(
        Result(TOKENS, {OURS: 2.0, "onnxruntime-genai fp32": 3.0, "slow": 8.0, "CTranslate2 float32": 4.0}, {}).lines()
    )
    assert "1.50 of onnxruntime-genai fp32" in lines[0]
    assert lines[1].strip() == "2.00 of CTranslate2 float32, the fastest that runs this very network"
    assert "very network" not in "".join(Result(TOKENS, {OURS: 2.0, "onnxruntime-genai fp32": 3.0}, {}).lines())


def test_the_nodes_of_a_step_are_counted_once_however_many_tokens_there_are(tmp_path: Path) -> None:
    settings = {"width": 16, "heads": 2, "feedforward": 24, "layers": 1, "vocabulary": 40, "max_positions": 48}
    bundle = export(find_source("gpt", settings), tmp_path / "gpt.bundle").bundle
    counts = [nodes_of_a_step(bundle.root, Job("A", 1, 4, tokens, words=30)) for tokens in (3, 9)]
    nodes = len(onnx.load(bundle.graph_path("decoder")).graph.node)
    assert counts[0] == counts[1]
    assert nodes / 2 < counts[0] <= nodes + 3  # onnxruntime fuses some; three rank the tokens


@pytest.mark.parametrize("architecture", ["transformer", "seq2seq-attention"])
def test_with_enough_beams_the_plain_beam_search_is_exhaustive_and_with_one_greedy(architecture: str) -> None:
    vocabulary, steps = 6, 4
    generator = find_source(architecture, {"vocabulary": 12, "target_vocabulary": vocabulary}).generator
    assert generator is not None
    network = generator.network
    with torch.inference_mode():
        torch.manual_seed(0)
        for parameter in network.parameters():  # what fresh weights say depends too little on the tokens before
            parameter.normal_(std=0.2)
        job = Job(architecture, 8, 4, steps, words=12)
        source = torch.from_numpy(job.prompts())
        torch.testing.assert_close(beam_search(network, source, job), greedy(network, source, job))
        found = beam_search(network, source, replace(job, beams=vocabulary ** (steps - 1)))
        words = torch.cartesian_prod(*[torch.tensor([token for token in range(vocabulary) if token != EOS])] * steps)
        for row, best in enumerate(found):
            scores = _scores(network, source[row : row + 1].expand(len(words), -1), words)
            torch.testing.assert_close(_scores(network, source[row : row + 1], best[None])[0], scores.max())


def _scores(network: Any, source: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sum of log-probabilities of each row, from one pass over the whole."""
    shifted = torch.cat([torch.full((len(tokens), 1), BOS), tokens[:, :-1]], dim=1)
    found: torch.Tensor = network(source, shifted).log_softmax(-1).gather(2, tokens[:, :, None]).sum((1, 2))
    return found
