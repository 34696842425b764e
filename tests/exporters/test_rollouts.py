"""What decoders are calibrated on is what arises when the network itself writes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporters.calibration import Statistics
from exporters.export import export
from exporters.fix import fix_sizes
from exporters.graph import read_model
from exporters.quantized_graphs import Part, convert_parts
from exporters.rollouts import PROMPTS, ROWS, _random_texts, calibration_of_text
from exporters.source import find_source
from runtime.bundle import DECODER, ENCODER, Bundle
from runtime.errors import DataError
from runtime.session import Session
from runtime.text import BOS, EOS
from runtime.tokens import token_input
from tests.runtime.generation.conftest import Make, tiny_network  # noqa: F401

CASES = [
    ("gpt", "portable"),
    ("gpt", "onnxruntime"),
    ("transformer", "onnxruntime"),
    ("seq2seq", "portable"),
    ("lstm", "portable"),
]
cases = pytest.mark.parametrize("case", CASES, ids="-".join)


def bundle_of(tiny_network: Make, case: tuple[str, str]) -> Bundle:  # noqa: F811
    return tiny_network(*case).model.bundle


def feeds_of(bundle: Bundle, graph: str = DECODER, **options: Any) -> list[dict[str, np.ndarray[Any, Any]]]:
    return [dict(feeds) for feeds in calibration_of_text(bundle, **options)(graph)]


@cases
def test_every_state_is_what_the_step_before_it_gave(case: tuple[str, str], tiny_network: Make) -> None:  # noqa: F811
    bundle = bundle_of(tiny_network, case)
    signature = bundle.manifest.graphs[DECODER].signature
    session = Session(bundle.graph_path(DECODER), signature, device="cpu", threads=1)
    found = feeds_of(bundle)
    followed = 0
    for before, after in pairwise(found):
        outputs = session.run(before)  # every feed fits the graph
        rows = len(after["tokens"])
        if after["tokens"].shape[1] != 1 or rows != len(before["tokens"]):
            continue  # another batch, or some texts have ended
        state = signature.states[-1]
        if after[state.input].shape == outputs[state.output].shape and np.array_equal(
            after[state.input], outputs[state.output]
        ):
            followed += 1
    assert followed > 10


@cases
def test_the_same_seed_gives_the_same_samples_and_another_one_others(case: tuple[str, str], tiny_network: Make) -> None:  # noqa: F811
    bundle = bundle_of(tiny_network, case)
    once, again, other = feeds_of(bundle), feeds_of(bundle), feeds_of(bundle, seed=1)
    assert len(once) == len(again)
    for one, two in zip(once, again, strict=True):
        assert one.keys() == two.keys()
        assert all(np.array_equal(one[name], two[name]) for name in one)
    assert [feeds["tokens"].tolist() for feeds in once] != [feeds["tokens"].tolist() for feeds in other]


@cases
def test_a_text_that_has_ended_takes_no_further_part(case: tuple[str, str], tiny_network: Make) -> None:  # noqa: F811
    found = feeds_of(bundle_of(tiny_network, case), texts=[[5, 6, 7, 8]] * PROMPTS)
    written = [feeds["tokens"] for feeds in found if feeds["tokens"].shape[1] == 1]
    steps = [tokens for tokens in written if not (tokens == BOS).all()]
    assert steps
    assert not any((tokens == EOS).any() for tokens in steps)
    assert len({len(tokens) for tokens in written}) > 1  # <eos> is likely in these networks


def test_prompts_are_the_beginnings_of_the_texts_that_are_given(tiny_network: Make) -> None:  # noqa: F811
    bundle = bundle_of(tiny_network, ("gpt", "portable"))
    text = [4, 5, 6, 7, 8] * 10
    prompts = [feeds["tokens"] for feeds in feeds_of(bundle, texts=[text]) if feeds["tokens"].shape[1] > 1]
    assert prompts
    for prompt in prompts:
        np.testing.assert_array_equal(prompt, [text[: prompt.shape[1]]] * len(prompt))


def test_an_encoder_reads_the_sources_that_are_given_padded(tiny_network: Make) -> None:  # noqa: F811
    bundle = bundle_of(tiny_network, ("transformer", "onnxruntime"))
    texts = [[4, 5, 6, 2], [7, 2], [8, 4, 5, 6, 7, 2]]
    (feeds,) = feeds_of(bundle, ENCODER, texts=texts)
    assert sorted(row[row != 0].tolist() for row in feeds["source"]) == sorted(texts)


def test_no_texts_at_all_are_refused(tiny_network: Make) -> None:  # noqa: F811
    with pytest.raises(DataError, match="there is no text to calibrate on; pass --data with at least one"):
        calibration_of_text(bundle_of(tiny_network, ("gpt", "portable")), [])


def test_a_network_that_only_reads_sees_both_segments_and_many_lengths(tmp_path: Path) -> None:
    sizes = {"vocabulary": 100, "width": 64, "heads": 2, "layers": 1, "feedforward": 128, "max_positions": 40}
    bundle = export(find_source("bert", sizes), tmp_path / "x.bundle").bundle
    found = feeds_of(bundle, "model")
    assert sum(len(feeds["tokens"]) for feeds in found) == ROWS
    assert len({feeds["tokens"].shape[1] for feeds in found}) > 5
    assert {int(feeds["segments"].max()) for feeds in found} == {0, 1}
    assert all(feeds["tokens"].size <= 512 for feeds in found)
    long = feeds_of(bundle, "model", texts=[[5] * 90])  # longer than its positions
    assert long[0]["tokens"].shape == (1, 40)
    reader = token_input(bundle, "model", "tokens")
    assert reader is not None
    assert all(0 not in text for text in _random_texts(reader, 50, seed=0))


def test_a_decoder_of_a_fixed_number_of_rows_is_calibrated_with_so_many(tmp_path: Path) -> None:
    sizes = {"vocabulary": 60, "width": 32, "heads": 2, "layers": 1, "feedforward": 64}
    bundle = export(fix_sizes(find_source("gpt", sizes), {"batch": 2}), tmp_path / "x.bundle").bundle
    found = feeds_of(bundle)
    assert {len(feeds["tokens"]) for feeds in found} == {2}
    converted = convert_parts(bundle, (Part("int8-static"),), calibration_of_text(bundle))
    assert any(node.quantized for node in converted.nodes)


def test_steps_widen_the_ranges_that_prompts_alone_give(tiny_network: Make) -> None:  # noqa: F811
    """Which is why states that arise are needed: of an LSTM the first hidden state is zero."""
    bundle = bundle_of(tiny_network, ("lstm", "portable"))
    model = read_model(bundle.graph_path(DECODER))
    state = bundle.manifest.graphs[DECODER].signature.states[0].input
    every = Statistics().of(model, {state: ()}, lambda: calibration_of_text(bundle)(DECODER))[state]
    assert every.low < -0.1 < 0.1 < every.high
