"""Bundles of networks on text in int8-weights and int4-weights: their laws, their quality, what they store."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from exporters import crossover
from exporters.export import export
from exporters.exportable import Exportable
from exporters.fix import fix_sizes
from exporters.graph import operators_of, read_model
from exporters.laws import check_laws, texts_for
from exporters.likelihood import compare_logits, quality_of_text
from exporters.quantize import Budget, MeasuredRefusal, QuantizeReport, quantize
from exporters.race import Speed
from exporters.source import find_source
from runtime.bundle import Bundle
from runtime.session import Session
from runtime.state import initial_state, step
from runtime.statistics import Estimate
from runtime.verify import verify_bundle

NETWORKS: dict[str, dict[str, Any]] = {
    "gpt": {"vocabulary": 200, "width": 64, "heads": 2, "layers": 2, "feedforward": 256},
    "transformer": {
        **{"vocabulary": 200, "target_vocabulary": 200, "width": 64, "heads": 2, "feedforward": 256},
        **{"encoder_layers": 1, "decoder_layers": 1, "shared_embeddings": True, "tied_output": True},
    },
}
SCHEME_NAMES = ("int8-weights", "int4-weights")
BUDGET = Budget(max_drop=30.0)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Exportable, Bundle]]:
    folder = tmp_path_factory.mktemp("text")
    networks = {name: find_source(name, settings) for name, settings in NETWORKS.items()}
    return {name: (network, export(network, folder / f"{name}.bundle").bundle) for name, network in networks.items()}


@pytest.fixture(autouse=True)
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are not about speed: whether a tiny network is faster is this machine's affair."""
    even = Speed(Estimate(1.0, 0.99, 1.01), Estimate(1.0, 0.99, 1.01), 100.0, 100.0, 1, 1, 1)
    monkeypatch.setattr("exporters.quantize.measure_speed", lambda *_: even)
    monkeypatch.setattr("exporters.quantize.crossover", lambda *_: 4)


def quantized(bundle: Bundle, target: Path, scheme: str, budget: Budget = BUDGET) -> tuple[QuantizeReport, Bundle]:
    report = quantize(bundle, target, scheme=scheme, quality=quality_of_text(bundle), budget=budget, threads=1)
    return report, Bundle.open(target)


def sessions_of(bundle: Bundle, decoder: str) -> dict[str, Session]:
    names = {"decoder": decoder} | ({"encoder": "encoder"} if "encoder" in bundle.manifest.graphs else {})
    return {
        role: Session(bundle.graph_path(name), bundle.manifest.graphs[name].signature, threads=1)
        for role, name in names.items()
    }


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_quantized_decoder_obeys_the_laws_within_its_tolerance(
    name: str, scheme: str, exported: dict[str, tuple[Exportable, Bundle]], tmp_path: Path
) -> None:
    network, bundle = exported[name]
    report, small = quantized(bundle, tmp_path / "q.bundle", scheme)
    assert report.size_ratio < 0.6
    assert report.metric_after > (99 if scheme == "int8-weights" else 90)
    assert verify_bundle(small.root)
    decoders = [graph for graph in small.manifest.graphs if graph.startswith("decoder")]
    assert decoders == (["decoder", "decoder.many"] if scheme == "int8-weights" else ["decoder"])
    assert network.generator is not None
    texts = texts_for(network.generator, {graph: entry.signature for graph, entry in bundle.manifest.graphs.items()})
    for decoder in decoders:
        allowed = small.manifest.tolerance[decoder]["logits"].allowed
        exact = bundle.manifest.tolerance["decoder"]["logits"].allowed
        assert allowed > 10 * exact
        laws = check_laws(network.generator, sessions_of(small, decoder), texts, allowed=2 * allowed)
        assert all(laws), [law.problem for law in laws]
        assert sum(law.skipped is None for law in laws) >= 4


@pytest.mark.parametrize("decoder", ["decoder", "decoder.many"])
def test_a_row_of_a_quantized_batch_answers_as_it_does_alone(
    decoder: str, exported: dict[str, tuple[Exportable, Bundle]], tmp_path: Path
) -> None:
    _, small = quantized(exported["gpt"][1], tmp_path / "q.bundle", "int8-weights")
    session = sessions_of(small, decoder)["decoder"]
    tokens = np.random.default_rng(0).integers(4, 200, (3, 6))
    together, _ = step(session, tokens, initial_state(session.signature, 3, capacity=8))
    for row in range(3):
        alone, _ = step(session, tokens[row : row + 1], initial_state(session.signature, 1, capacity=8))
        np.testing.assert_allclose(alone[0], together[row], atol=2e-5)


def test_the_manifest_says_from_how_many_rows_the_other_form_is_faster(
    exported: dict[str, tuple[Exportable, Bundle]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bundle = exported["gpt"]
    report, small = quantized(bundle, tmp_path / "q.bundle", "int8-weights")
    assert small.manifest.generation == {**(bundle.manifest.generation or {}), "many_rows_from": 4}
    assert small.manifest.graphs["decoder.many"].signature == small.manifest.graphs["decoder"].signature
    assert {golden.graph for golden in small.manifest.goldens} == {"decoder", "decoder.many"}
    assert any("decoder.many is the faster form of the decoder from 4 rows on" in note for note in report.notes)
    monkeypatch.setattr("exporters.quantize.crossover", lambda *_: None)
    report, smaller = quantized(bundle, tmp_path / "r.bundle", "int8-weights")
    assert list(smaller.manifest.graphs) == ["decoder"]
    assert smaller.manifest.generation == bundle.manifest.generation
    assert smaller.graph_bytes < 0.7 * small.graph_bytes
    assert any("form for many rows was left out" in note for note in report.notes)


def test_where_only_size_matters_a_decoder_has_one_form(exported: dict[str, tuple[Exportable, Bundle]], tmp_path: Path) -> None:
    _, small = quantized(exported["gpt"][1], tmp_path / "q.bundle", "int8-weights", Budget(for_size=True))
    assert list(small.manifest.graphs) == ["decoder"]


def test_encoder_and_decoder_keep_one_embedding_and_the_encoder_takes_many_rows(
    exported: dict[str, tuple[Exportable, Bundle]], tmp_path: Path
) -> None:
    _, small = quantized(exported["transformer"][1], tmp_path / "q.bundle", "int8-weights")
    encoder, decoder, many = (operators_of(read_model(small.graph_path(name))) for name in small.manifest.graphs)
    assert encoder["com.microsoft::MatMulIntegerToFloat"] == 8  # attention, feed-forward, and the decoder's keys and values
    assert decoder["com.microsoft::MatMulNBits"] == many["com.microsoft::MatMulIntegerToFloat"]
    assert not encoder["com.microsoft::MatMulNBits"]
    assert not (encoder + decoder + many)["MatMul"]
    embedding = 200 * 64
    shared = (small.root / "weights.data").stat().st_size
    positions = 512 * 64
    assert embedding + positions < shared < 2 * (embedding + positions)
    for name in small.manifest.graphs:
        assert (small.root / f"{name}.onnx").stat().st_size < 10 * embedding


def test_a_tied_embedding_is_stored_once_in_a_bundle_of_one_graph(
    exported: dict[str, tuple[Exportable, Bundle]], tmp_path: Path
) -> None:
    _, small = quantized(exported["gpt"][1], tmp_path / "q.bundle", "int4-weights")
    assert small.manifest.graphs["decoder"].weights == ("weights.data",)
    stored = onnx.load(small.graph_path("decoder"), load_external_data=False).graph.initializer
    places = Counter(item.external_data[1].value for item in stored if item.data_location == TensorProto.EXTERNAL)
    assert places["0"] == 2  # the table and the output layer
    assert (small.root / "weights.data").stat().st_size >= 200 * 64 // 2


def test_quality_is_judged_on_what_the_original_writes(exported: dict[str, tuple[Exportable, Bundle]], tmp_path: Path) -> None:
    _, bundle = exported["gpt"]
    quality = quality_of_text(bundle)
    assert quality.measure(bundle) == 100.0
    assert quality.data == "96 tokens that the original itself writes"
    with pytest.raises(MeasuredRefusal, match=r"likelihood drops by .* more than the 1e-07 that --max-drop allows") as caught:
        quantized(bundle, tmp_path / "q.bundle", "int4-weights", Budget(max_drop=1e-7, for_size=True))
    assert "nats a token, the likeliest token is the same for" in caught.value.report.notes[0]
    assert not (tmp_path / "q.bundle").exists()


def test_likelihood_is_the_exponential_of_the_divergence() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    same = compare_logits(reference, reference + 7)
    assert (same.likelihood, same.agreement, same.tokens) == (pytest.approx(100), 100.0, 2)
    other = compare_logits(reference, np.log(np.array([[0.25, 0.625, 0.125], [0.1, 0.1, 0.8]])))
    assert other.divergence == pytest.approx((0.5 * np.log(2) + 0.25 * np.log(0.25 / 0.625) + 0.25 * np.log(2)) / 2)
    assert other.likelihood == pytest.approx(100 * np.exp(-other.divergence))
    assert other.agreement == 50.0
    assert compare_logits(reference, np.full((2, 3), np.nan)).likelihood == 0.0


def many_bundle(exported: dict[str, tuple[Exportable, Bundle]], folder: Path) -> Bundle:
    return quantized(exported["gpt"][1], folder / "q.bundle", "int8-weights")[1]


def test_the_crossover_is_the_least_number_of_rows_from_which_on_the_other_form_always_wins(
    exported: dict[str, tuple[Exportable, Bundle]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = many_bundle(exported, tmp_path)

    def found(*, many_wins_at: set[int]) -> int | None:
        rows = iter(reversed(crossover.ROWS))  # it goes down from the largest
        monkeypatch.setattr(crossover, "_fastest", lambda runs: [2.0, 1.0 if next(rows) in many_wins_at else 3.0])
        return crossover.crossover(bundle, threads=1)

    assert found(many_wins_at=set(crossover.ROWS)) == crossover.ROWS[0]
    assert found(many_wins_at={2, 8, 12, 16, 32}) == 8
    assert found(many_wins_at={2, 3, 4}) is None


def test_both_forms_are_really_run_to_find_the_crossover(
    exported: dict[str, tuple[Exportable, Bundle]], tmp_path: Path
) -> None:
    assert crossover.crossover(many_bundle(exported, tmp_path), threads=1) in {None, *crossover.ROWS}


def test_a_decoder_of_a_fixed_number_of_rows_has_one_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporters.quantize.crossover", crossover.crossover)
    bundle = export(fix_sizes(find_source("gpt", NETWORKS["gpt"]), {"batch": 2}), tmp_path / "x.bundle").bundle
    report, small = quantized(bundle, tmp_path / "q.bundle", "int8-weights")
    assert list(small.manifest.graphs) == ["decoder"]
    assert "or their number is fixed" in report.notes[-1]
    assert verify_bundle(small.root)
