"""Attention of generated texts to their source, and beams ranked by how much of it they cover."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import runtime
from exporters.export import export
from exporters.fix import fix_sizes
from exporters.source import find_source
from runtime.errors import OptionError
from runtime.generation.alignment import LEAST_ATTENTION, coverage
from runtime.generation.options import Generation

from ...aligned_networks import NAMES, aligned_network, attention_of_text, network_of

Shared = Callable[[str, Callable[[Path], object]], Path]
BEGIN, STOP = 2, 7
SOURCES = [[5, 6, 7, 8, 9], [11], [4, 17, 12], [16, 15, 14, 13, 12, 11, 10]]
GIVEN = {"prefix": [BEGIN]}
BEAMS = {**GIVEN, "max_new_tokens": 6, "stop_tokens": [STOP, 3], "beams": 6, "n_best": 6}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str, shared: Shared) -> Any:
    def make(folder: Path) -> None:
        export(aligned_network(name, attention=True), folder / f"{name}.bundle", force=True)

    return runtime.load(shared(f"aligned-{name}", make) / f"{name}.bundle")


@pytest.fixture
def network(name: str) -> Any:
    return network_of(aligned_network(name))


def check_attention(network: Any, source: list[int], found: Generation, prompt: tuple[int, ...] = (BEGIN,)) -> None:
    """That of PyTorch, which is fed the text up to its last token."""
    expected = attention_of_text(network, source, [*prompt, *found.tokens])[len(prompt) - 1 : -1]
    assert found.attention is not None
    assert found.attention.dtype == np.float32
    assert found.attention.shape == (len(found.tokens), len(source))
    np.testing.assert_allclose(found.attention, expected, atol=1e-5)


def test_the_attention_of_ragged_sources_is_pytorch_s(model: Any, network: Any) -> None:
    found = model.generate(SOURCES, **GIVEN, max_new_tokens=5, attention=True)
    for source, generation in zip(SOURCES, found, strict=True):
        check_attention(network, source, generation)
    assert max(float(generation.attention.max()) for generation in found if generation.attention.shape[1] > 1) > 0.6


def test_the_attention_of_beams_is_pytorch_s(model: Any, network: Any) -> None:
    for source, several in zip(SOURCES, model.generate(SOURCES, **BEAMS, attention=True), strict=True):
        assert len({len(generation.tokens) for generation in several} | {generation.finish for generation in several}) > 1
        for generation in several:
            check_attention(network, source, generation)


def test_forced_and_drawn_tokens_have_attention_too(model: Any, network: Any) -> None:
    found = model.generate(
        SOURCES[0], **{**GIVEN, "prefix": [BEGIN, 9, 10]}, max_new_tokens=5, temperature=1.0, seed=3, n_best=3, attention=True
    )
    for generation in found:
        assert generation.tokens[:2] == (9, 10)
        check_attention(network, SOURCES[0], generation)


def test_a_text_that_ends_at_once_has_no_rows(model: Any) -> None:
    allowed = [token for token in range(18) if token != STOP]
    found = model.generate(
        SOURCES[0], prefix=[BEGIN], stop_tokens=[STOP], bad_words=[[token] for token in allowed], attention=True
    )
    assert (found.tokens, found.finish) == ((), "stop")
    assert found.attention.shape == (0, len(SOURCES[0]))


def test_attention_is_there_only_on_request_and_changes_nothing_else(model: Any) -> None:
    plain = model.generate(SOURCES, **BEAMS)
    asked = model.generate(SOURCES, **BEAMS, attention=True)
    ranked = model.generate(SOURCES, **BEAMS, coverage_penalty=0.5)
    assert all(generation.attention is None for several in (*plain, *ranked) for generation in several)
    for one, other in zip(plain, asked, strict=True):
        assert [(item.tokens, item.score) for item in one] == [(item.tokens, item.score) for item in other]


def plain_coverage(weights: NDArray[Any]) -> float:
    """Wu et al., 2016, equation 14, word by word."""
    total = 0.0
    for column in range(weights.shape[1]):
        received = sum(float(weights[row, column]) for row in range(weights.shape[0]))
        total += math.log(min(max(received, LEAST_ATTENTION), 1.0))
    return total


def scored_by_hand(network: Any, source: list[int], several: list[Generation], penalty: float) -> list[tuple[Any, float]]:
    """By text: groups of beams may find the same one twice, with different scores."""
    scored = []
    for generation in several:
        fed = [BEGIN, *generation.tokens]
        counted = len(generation.tokens) + (generation.finish == "stop")  # the ending token pays attention as well
        weights = attention_of_text(network, source, fed)[:counted]
        scored.append((generation.tokens, generation.score + penalty * plain_coverage(weights)))
    return sorted(scored)


@pytest.mark.parametrize("more", [{}, {"groups": 3, "diversity": 0.5}, {"no_repeat_ngram": 2, "min_new_tokens": 2}])
def test_the_coverage_penalty_ranks_what_finished(model: Any, network: Any, more: dict[str, Any]) -> None:
    penalty = 2.0
    moved = 0
    for source in SOURCES:
        plain = model.generate(source, **BEAMS, **more)
        found = model.generate(source, **BEAMS, **more, coverage_penalty=penalty)
        expected = scored_by_hand(network, source, plain, penalty)
        by_text = sorted((item.tokens, item.score) for item in found)
        assert [tokens for tokens, _ in by_text] == [tokens for tokens, _ in expected]
        assert [score for _, score in by_text] == pytest.approx([score for _, score in expected], abs=1e-3)
        assert [item.score for item in found] == sorted((item.score for item in found), reverse=True)
        moved += [item.tokens for item in found] != [item.tokens for item in plain]
        best = model.generate(source, **{**BEAMS, "n_best": 1}, **more, coverage_penalty=penalty, attention=True)
        assert best.score == pytest.approx(max(score for _, score in expected), abs=1e-3)
        check_attention(network, source, best)
    assert moved >= 2


def test_a_running_batch_ranks_by_the_penalty_too(model: Any) -> None:
    ticket = (batch := model.scheduler()).submit(SOURCES[0], **BEAMS, coverage_penalty=2.0)
    batch.run()
    again = [item.tokens for item in ticket.results()]
    assert again == [item.tokens for item in model.generate(SOURCES[0], **BEAMS, coverage_penalty=2.0)]


def test_coverage_of_known_weights() -> None:
    weights = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], np.float32)
    assert coverage(weights) == pytest.approx(0.0 + math.log(0.5) + math.log(LEAST_ATTENTION))
    assert coverage(np.eye(3, dtype=np.float32)) == 0.0


def test_a_bundle_of_one_row_gives_attention(tmp_path: Path) -> None:
    made = aligned_network("seq2seq-attention", attention=True)
    model = runtime.load(export(fix_sizes(made, {"batch": 1}), tmp_path / "x.bundle").bundle.root)
    for source, found in zip(SOURCES, model.generate(SOURCES, **GIVEN, max_new_tokens=3, attention=True), strict=True):
        check_attention(network_of(made), source, found)


def test_a_bundle_without_the_graph_says_how_to_make_one_with_it(tmp_path: Path) -> None:
    model = runtime.load(export(aligned_network("seq2seq-attention"), tmp_path / "x.bundle").bundle.root)
    for options in ({"attention": True}, {"beams": 2, "coverage_penalty": 0.2}):
        with pytest.raises(OptionError) as refusal:
            model.generate([5, 6], prefix=[BEGIN], **options)
        assert str(refusal.value) == (
            "attention and coverage_penalty need the graph 'alignment', which this bundle does not have; make the bundle with: "
            "edgekit export … --attention"
        )


def test_a_language_model_has_no_source_to_look_at(tmp_path: Path) -> None:
    sizes = {"vocabulary": 20, "embedding": 8, "hidden": 8}
    model = runtime.load(export(find_source("gru", sizes), tmp_path / "x.bundle").bundle.root)
    with pytest.raises(OptionError, match="look at a source, and a language model has none; leave them out"):
        model.generate([5, 6], attention=True)
