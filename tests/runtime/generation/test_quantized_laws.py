"""The laws of decoding on quantized bundles: whatever a form answers, it answers alike alone, in a batch and piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runtime
from exporters.quantized_graphs import convert, draft
from runtime.bundle import MANY, Bundle, write_bundle
from runtime.model import Model

from .conftest import Make
from .networks import ROOM, assert_same, prompts

NETWORKS = [("gpt", "onnxruntime"), ("gpt", "portable"), ("transformer", "onnxruntime"), ("seq2seq-attention", "portable")]
FORMS = [("int8-weights", False), ("int8-weights", True), ("int4-weights", False)]
STRATEGIES: list[dict[str, Any]] = [{}, {"beams": 3, "n_best": 2}, {"temperature": 1.0, "seed": 5}]
Shared = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(
    params=[(*network, *form) for network in NETWORKS for form in FORMS], ids=lambda value: "-".join(map(str, value))
)
def model(request: pytest.FixtureRequest, tiny_network: Make, shared: Shared) -> Model:
    name, profile, scheme, many_rows = request.param
    bundle = tiny_network(name, profile).model.bundle

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("exporters.quantizers.scheme._FEWEST_WEIGHTS", 0)  # networks as tiny as these are not worth it
            manifest, files = draft(bundle, convert(bundle, scheme, (), (), None), scheme)
        write_bundle(folder / "x.bundle", manifest, files)

    path = shared(f"tiny-{name}-{profile}-{scheme}", make) / "x.bundle"
    return runtime.load(path, device="cpu", threads=1, many_rows=many_rows)


def test_it_is_quantized_and_int8_has_a_form_for_many_rows(model: Model) -> None:
    manifest = Bundle.open(model.bundle.root).manifest
    assert any("MatMulNBits" in operator for operator in manifest.requirements["operators"])
    assert (MANY in manifest.graphs) == (manifest.precision == "int8-weights")


@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_a_row_in_a_batch_is_the_row_alone(model: Model, options: dict[str, Any]) -> None:
    batch = prompts(5, seed=3)
    together = model.generate(batch, max_new_tokens=ROOM, **options)
    for prompt, found in zip(batch, together, strict=True):
        assert_same(found, model.generate(prompt, max_new_tokens=ROOM, **options))


def test_streaming_and_joining_a_running_batch_change_nothing(model: Model) -> None:
    batch = prompts(4, seed=4)
    alone = [model.generate(prompt, max_new_tokens=ROOM) for prompt in batch]
    assert ["".join(model.stream(prompt, max_new_tokens=ROOM)) for prompt in batch] == [found.text for found in alone]
    running = model.scheduler(most_rows=2)
    tickets = []
    for prompt in batch:
        tickets.append(running.submit(prompt, max_new_tokens=ROOM))
        running.step()
    running.run()
    for ticket, expected in zip(tickets, alone, strict=True):
        assert_same(ticket.results(), expected)


def test_speculation_is_plain_decoding(model: Model) -> None:
    for prompt in ([4, 5, 6, 4, 5, 6, 4, 5], [7, 8, 7, 8, 7, 8]):
        plain = model.generate(prompt, max_new_tokens=30)
        assert_same(model.generate(prompt, max_new_tokens=30, speculate=True), plain)


def test_a_prompt_in_pieces_is_the_prompt_at_once(model: Model) -> None:
    if model.task != "language-model":
        pytest.skip("a source is read as a whole")
    (prompt,) = prompts(1, longest=9, seed=6)
    prompt = [*prompt, 5, 6, 7]
    whole = model.generate(prompt, max_new_tokens=ROOM)
    pieces = model.read(prompt[:1])
    for token in prompt[1:-1]:
        pieces.read([token])
    assert_same(pieces.generate(prompt[-1:], max_new_tokens=ROOM), whole)
