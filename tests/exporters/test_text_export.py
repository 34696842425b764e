"""Networks on text: their graphs, names and shapes, both profiles, and the laws of decoding with faults planted in them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

import exporters.double as double
import exporters.export as export_module
import exporters.laws as laws
import exporters.parity as parity
import exporters.text_graphs as text_graphs
import exporters.trace as trace
import exporters.weights as weights
import runtime
from architectures.layers.reading import Reading, read, shift_to_front
from exporters.export import export
from exporters.fix import fix_sizes
from exporters.graph import read_model
from exporters.source import find_source
from runtime.bundle import Bundle
from runtime.errors import OptionError, ParityRefused, SourceError, UnknownName
from runtime.session import Session
from runtime.state import initial_state, step
from runtime.verify import verify_bundle

TINY_GPT = {"vocabulary": 20, "width": 16, "heads": 2, "layers": 1, "feedforward": 32, "max_positions": 64}
TINY_TRANSFORMER = {
    "vocabulary": 20,
    "target_vocabulary": 20,
    "width": 16,
    "heads": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "feedforward": 32,
    "shared_embeddings": True,
}
LAWS = {"prefill = steps", "chunked = whole", "row = alone", "padding changes nothing", "reorder = recompute"}


def operators(bundle: Bundle, graph: str) -> list[str]:
    return [node.op_type for node in read_model(bundle.graph_path(graph)).graph.node]


def offsets_of_external_weights(path: Path) -> set[str]:
    weights = onnx.load(path, load_external_data=False).graph.initializer
    return {tensor.external_data[1].value for tensor in weights if tensor.data_location == onnx.TensorProto.EXTERNAL}


def test_a_portable_language_model_has_standard_operators_and_a_cache_that_grows(tmp_path: Path) -> None:
    report = export(find_source("gpt", TINY_GPT, profile="portable"), tmp_path / "x.bundle", thorough=True)
    assert {law.law for law in report.laws} == LAWS
    signature = report.bundle.manifest.graphs["decoder"].signature
    assert [str(spec) for spec in signature.inputs[:4]] == [
        "tokens: int64[batch, time]",
        "wanted: int64[kept]",
        "past.real: bool[batch, past]",
        "past.0.key: float32[batch, 2, past, 8]",
    ]
    assert [spec.name for spec in signature.outputs[:3]] == ["logits", "present.real", "present.0.key"]
    assert set(signature.outputs[2].shape[2].split(" + ")) == {"past", "time"}
    assert all(node.domain in ("", "ai.onnx") for node in read_model(report.bundle.graph_path("decoder")).graph.node)
    assert verify_bundle(report.bundle.root)


def test_the_onnxruntime_profile_has_fused_attention_and_a_cache_in_place(tmp_path: Path) -> None:
    report = export(find_source("gpt", TINY_GPT | {"layers": 2}), tmp_path / "x.bundle", thorough=True)
    assert report.profile == "onnxruntime"
    assert {law.law for law in report.laws} == LAWS
    assert operators(report.bundle, "decoder").count("GroupQueryAttention") == 2
    states = report.bundle.manifest.graphs["decoder"].signature.states
    assert [state.filled for state in states] == [None, *["present.length"] * 4]
    assert verify_bundle(report.bundle.root)


def test_both_profiles_give_the_same_logits(tmp_path: Path) -> None:
    logits = []
    for profile in ("portable", "onnxruntime"):
        bundle = export(find_source("gpt", TINY_GPT, profile=profile), tmp_path / f"{profile}.bundle").bundle
        session = runtime.load(bundle.root).sessions["decoder"]
        state = initial_state(session.signature, 2, capacity=9)
        tokens = np.random.default_rng(1).integers(4, 20, (2, 6))
        first, state = step(session, tokens, state)
        second, _ = step(session, tokens[:, :1], state)
        logits.append(np.concatenate([first, second], axis=1))
    np.testing.assert_allclose(*logits, atol=1e-5)


def test_an_encoder_and_its_decoder_store_shared_weights_once(tmp_path: Path) -> None:
    bundle = export(find_source("transformer", TINY_TRANSFORMER | {"decoder_layers": 2}), tmp_path / "x.bundle").bundle
    graphs = bundle.manifest.graphs
    assert graphs["encoder"].weights == graphs["decoder"].weights == ("weights.data",)
    pointers = [offsets_of_external_weights(bundle.graph_path(name)) for name in graphs]
    assert pointers[0] & pointers[1]
    embedding = 20 * 16 * 4
    table = 512 * 16 * 4
    stored = (bundle.root / "weights.data").stat().st_size
    assert embedding + table <= stored < 2 * (embedding + table)
    memory = [spec.name for spec in graphs["encoder"].signature.outputs]
    assert memory == ["memory.mask", "memory.0.key", "memory.0.value", "memory.1.key", "memory.1.value"]
    assert set(memory) <= {spec.name for spec in graphs["decoder"].signature.inputs}
    assert "weights.data" in {path.name for path in bundle.root.iterdir()}
    assert verify_bundle(bundle.root)


def test_the_decoder_does_not_project_the_memory_again(tmp_path: Path) -> None:
    """The keys and values of the source are products of the encoder: the decoder's graph has no weight for them."""
    bundle = export(find_source("transformer", TINY_TRANSFORMER, profile="portable"), tmp_path / "x.bundle").bundle
    squares = [tensor for tensor in read_model(bundle.graph_path("decoder")).graph.initializer if list(tensor.dims) == [16, 16]]
    of_a_layer = ["query", "key", "value", "output", "cross query", "cross output"]
    assert len(squares) == len(of_a_layer)


@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_recurrent_layers_of_any_depth_and_direction_are_one_operator_a_layer(kind: str, tmp_path: Path) -> None:
    """Rows of different lengths in a batch included: the fuzz cases are ragged."""
    settings = {"task": "classification", "layers": 2, "bidirectional": True, "vocabulary": 20, "embedding": 8, "hidden": 8}
    report = export(find_source(kind, settings), tmp_path / "x.bundle")
    assert operators(report.bundle, "model").count(kind.upper()) == 2
    assert {case.sizes["time"] for case in report.cases} >= {1, 2, 4, 6, 25}
    assert not {"Loop", "Scan", "If"} & set(operators(report.bundle, "model"))


def test_a_finished_row_keeps_its_state(tmp_path: Path) -> None:
    settings = {"vocabulary": 20, "embedding": 8, "hidden": 8}
    bundle = export(find_source("lstm", settings), tmp_path / "x.bundle").bundle
    session = runtime.load(bundle.root).sessions["decoder"]
    _, state = step(session, np.full((2, 3), 7), initial_state(session.signature, 2))
    _, after = step(session, np.array([[5], [0]]), state)
    assert not np.array_equal(after["past.hidden"][:, 0], state["past.hidden"][:, 0])
    for name in ("past.hidden", "past.cell"):
        np.testing.assert_array_equal(after[name][:, 1], state[name][:, 1])


def test_rolling_rows_to_the_front_is_undone() -> None:
    tokens = torch.tensor([[0, 0, 5, 6], [7, 8, 0, 0], [0, 9, 4, 0], [0, 0, 0, 0]])
    shifted, lengths, restore = shift_to_front(tokens, 0)
    assert shifted.tolist() == [[5, 6, 0, 0], [7, 8, 0, 0], [9, 4, 0, 0], [0, 0, 0, 0]]
    assert lengths.tolist() == [2, 2, 2, 0]
    assert torch.equal(restore(shifted.unsqueeze(-1).float()).squeeze(-1).long(), tokens)


def test_fixed_sizes_reach_the_graph_and_the_laws_still_hold(tmp_path: Path) -> None:
    network = fix_sizes(find_source("gpt", TINY_GPT), {"batch": 1, "time": 1, "capacity": 16})
    report = export(network, tmp_path / "x.bundle")
    assert not report.bundle.manifest.graphs["decoder"].signature.dynamic_axes
    assert {law.law for law in report.laws if not law.skipped} == LAWS - {"row = alone"}
    assert [law.skipped for law in report.laws if law.skipped] == ["the graph takes 1 rows"]


def test_what_cannot_be_fixed_is_refused() -> None:
    network = find_source("gpt", TINY_GPT, profile="portable")
    with pytest.raises(UnknownName, match="no dynamic axis named 'bath'; did you mean 'batch'"):
        fix_sizes(network, {"bath": 1})
    with pytest.raises(OptionError, match="--fix past: a cache that grows .* --fix capacity"):
        fix_sizes(network, {"past": 8})
    with pytest.raises(OptionError, match="--fix batch=0 is not a size; expected 1 or more"):
        fix_sizes(network, {"batch": 0})


def test_a_profile_that_would_change_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match="fuses the attention of this catalogue's networks on text, and lenet has none"):
        find_source("lenet", profile="onnxruntime")
    with pytest.raises(UnknownName, match="no profile named 'fast'"):
        find_source("gpt", profile="fast")
    find_source("lenet", profile="portable")


def test_external_data_on_request(tmp_path: Path) -> None:
    bundle = export(find_source("mlp"), tmp_path / "x.bundle", external_data=True).bundle
    assert bundle.manifest.graphs["model"].weights == ("weights.data",)
    assert bundle.graph_path().stat().st_size < (bundle.root / "weights.data").stat().st_size
    assert verify_bundle(bundle.root)


def test_no_session_is_open_while_pytorch_computes_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may hold either of a large network, and not both."""
    opened: list[weakref.ref[Session]] = []
    alive: list[int] = []

    def open_model(*arguments: Any) -> Session:
        session = weights.open_model(*arguments)
        opened.append(weakref.ref(session))
        return session

    @contextmanager
    def in_float64(module: Any) -> Iterator[None]:
        alive.append(sum(session() is not None for session in opened))
        with double.in_float64(module):
            yield

    monkeypatch.setattr(export_module, "open_model", open_model)
    for module in (laws, parity):
        monkeypatch.setattr(module, "in_float64", in_float64)
    export(find_source("gpt", TINY_GPT), tmp_path / "x.bundle")
    assert len(opened) == 2  # of the fuzz, and of the laws
    assert alive
    assert not any(alive)


def test_weights_too_large_for_a_graph_are_kept_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is done above 2 GB, with the limit lowered."""
    for module in (trace, weights):
        monkeypatch.setattr(module, "LARGEST_INLINE", 10_000)
    bundle = export(find_source("transformer", TINY_TRANSFORMER), tmp_path / "x.bundle").bundle
    assert {graph.weights for graph in bundle.manifest.graphs.values()} == {("weights.data",)}
    assert all(path.stat().st_size < 100_000 for path in bundle.root.glob("*.onnx"))
    assert (bundle.root / "weights.data").stat().st_size > 20_000
    assert verify_bundle(bundle.root)


# Faults planted in a decoder: each must be caught by the law it breaks, and nothing may be written.


@contextmanager
def off_by_one_positions() -> Iterator[None]:
    def wrong(tokens: Tensor, pad: int, record: Tensor) -> Reading:
        right = read.plain(tokens, pad, record)
        late = (record.sum(dim=1, keepdim=True) > 0).long()  # only where there is a past: the whole text shows nothing
        return Reading(right.tokens, right.positions + late, right.visible, right.record)

    with read.replaced_by(wrong):
        yield


@contextmanager
def unmasked_padding() -> Iterator[None]:
    with read.replaced_by(lambda tokens, pad, record: read.plain(tokens, -1, record)):
        yield


@contextmanager
def swapped_past() -> Iterator[None]:
    original = text_graphs.Decoder._run

    def swapped(self: Any, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        logits, record, keys, values, *others = original(self, *args, **options)
        return logits, record, values, keys, *others

    text_graphs.Decoder._run = swapped  # type: ignore[method-assign]
    try:
        yield
    finally:
        text_graphs.Decoder._run = original  # type: ignore[method-assign]


@contextmanager
def forgotten_record() -> Iterator[None]:
    """The cache forgets which of its keys were padding."""

    def wrong(tokens: Tensor, pad: int, record: Tensor) -> Reading:
        right = read.plain(tokens, pad, record)
        return Reading(right.tokens, right.positions, right.visible, torch.ones_like(right.record))

    with read.replaced_by(wrong):
        yield


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        (off_by_one_positions, "prefill = steps: the text step by step differs"),
        (swapped_past, "chunked = whole: the text cut after 1 differs"),
        (unmasked_padding, "padding changes nothing: row 1 padded on the left differs"),
        (forgotten_record, "padding changes nothing: row 1, a step after padding on the left differs"),
    ],
)
def test_a_planted_fault_is_caught_by_the_law_it_breaks(fault: Any, law: str, tmp_path: Path) -> None:
    with fault(), pytest.raises(ParityRefused) as caught:
        export(find_source("gpt", TINY_GPT, profile="portable"), tmp_path / "x.bundle")
    assert "gpt was not written: its decoder breaks a law of decoding." in str(caught.value)
    assert law in str(caught.value)
    assert "allowed" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_batch_baked_into_a_decoder_is_refused_by_name(tmp_path: Path) -> None:
    def baked(tokens: Tensor, pad: int, record: Tensor) -> Reading:
        right = read.plain(tokens, pad, record)
        return Reading(right.tokens, right.positions.view(3, -1), right.visible, right.record)

    with read.replaced_by(baked), pytest.raises((ParityRefused, SourceError), match="axis 0 of .tokens. is always 3"):
        export(find_source("gpt", TINY_GPT, profile="portable"), tmp_path / "x.bundle")
    assert not list(tmp_path.iterdir())


# What a proof must not overlook.


def test_a_step_of_several_rows_is_among_the_goldens(tmp_path: Path) -> None:
    bundle = export(find_source("gpt", TINY_GPT), tmp_path / "x.bundle").bundle
    shapes = {inputs["tokens"].shape for _, inputs, _ in bundle.goldens()}
    assert (3, 1) in shapes
    steps = next(inputs for _, inputs, _ in bundle.goldens() if inputs["tokens"].shape == (3, 1))
    assert len(set(steps["past.length"].tolist())) > 1  # rows of different lengths


def test_a_law_that_was_not_compared_is_not_called_proved(tmp_path: Path) -> None:
    network = fix_sizes(find_source("gpt", TINY_GPT), {"capacity": 1, "time": 1})
    laws = {law.law: law for law in export(network, tmp_path / "x.bundle").laws}
    assert laws["reorder = recompute"].skipped == "a text of 1 tokens, all that fits, cannot show it"
    assert laws["padding changes nothing"].skipped
    assert not laws["row = alone"].skipped


@pytest.mark.parametrize("sizes", [{"batch": 2}, {"batch": 2, "time": 1}, {"batch": 1, "time": 4}])
def test_a_fixed_batch_is_continued_token_by_token(sizes: dict[str, int], tmp_path: Path) -> None:
    assert all(export(fix_sizes(find_source("gpt", TINY_GPT), sizes), tmp_path / "x.bundle").laws)


def test_rows_that_no_kernel_can_continue_are_refused() -> None:
    with pytest.raises(
        OptionError, match="--fix batch=2 with --fix time=4: onnxruntime's kernel continues several rows by one"
    ):
        fix_sizes(find_source("gpt", TINY_GPT), {"batch": 2, "time": 4})


def test_the_capacity_of_an_encoder_decoder_can_be_fixed(tmp_path: Path) -> None:
    network = fix_sizes(find_source("transformer", TINY_TRANSFORMER), {"capacity": 16})
    shapes = [spec.shape for spec in export(network, tmp_path / "x.bundle").graphs[1].signature.inputs]
    assert ("batch", 2, 16, 8) in shapes


def test_another_padding_token_and_a_tiny_vocabulary_are_proved_too(tmp_path: Path) -> None:
    assert all(export(find_source("gpt", TINY_GPT | {"pad": 7, "vocabulary": 9}), tmp_path / "x.bundle").laws)


def test_too_few_positions_to_try_anything_are_refused() -> None:
    with pytest.raises(OptionError, match="max_positions is 4, .* set max_positions=16 or more"):
        find_source("gpt", TINY_GPT | {"max_positions": 4})
