"""Graphs that no message can hold go the same way as others, with their weights in files. Here the limits are lowered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.transformers import float16

from exporters import trace, weights
from exporters.calibration import Feeds
from exporters.export import export
from exporters.graph import read_model
from exporters.optimize import optimize
from exporters.quantized_graphs import Part, convert, draft
from exporters.quantizers import SCHEMES
from exporters.quantizers.scheme import Calibration
from exporters.rollouts import calibration_of_text
from exporters.sensitivity import sensitivity
from exporters.source import find_source
from exporters.tensors import array_of, is_mapped
from runtime.bundle import Bundle, write_bundle
from runtime.errors import SourceError
from runtime.session import Session
from runtime.verify import verify_bundle

GPT = {"vocabulary": 200, "width": 64, "heads": 2, "layers": 2, "feedforward": 256}
Answers = list[dict[str, Any]]


def lower_limits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weights, "LARGE", 0)
    for module in (trace, weights):
        patch.setattr(module, "LARGEST_INLINE", 10_000)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """With all weights in a file beside the graph."""
    folder = tmp_path_factory.mktemp("large")
    networks = {"gpt": find_source("gpt", GPT, profile="onnxruntime"), "lenet": find_source("lenet")}
    with pytest.MonkeyPatch.context() as patch:
        lower_limits(patch)
        return {name: export(network, folder / f"{name}.bundle").bundle for name, network in networks.items()}


def calibration_of(bundle: Bundle) -> Calibration:
    if "decoder" in bundle.manifest.graphs:
        return calibration_of_text(bundle)

    def goldens(graph: str) -> Iterator[Feeds]:
        return (inputs for entry, inputs, _ in bundle.goldens() if entry.graph == graph)

    return goldens


def answers_of(bundle: Bundle) -> Answers:
    sessions = {
        name: Session(bundle.graph_path(name), graph.signature, device="cpu") for name, graph in bundle.manifest.graphs.items()
    }
    return [sessions[entry.graph].run(inputs) for entry, inputs, _ in bundle.goldens()]


def quantized(bundle: Bundle, scheme: str, folder: Path) -> Bundle:
    folder.mkdir()
    converted = convert(bundle, scheme, calibration=calibration_of(bundle))
    return write_bundle(folder / "x.bundle", *draft(bundle, converted, scheme, folder))


def test_large_weights_are_mapped_and_small_ones_are_not(exported: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    path = exported["gpt"].graph_path()
    plain = weights.read_mapped(path)
    assert not any(map(is_mapped, plain.graph.initializer))
    lower_limits(monkeypatch)
    mapped = weights.read_mapped(path)
    assert mapped.ByteSize() < plain.ByteSize() / 5
    assert any(map(is_mapped, mapped.graph.initializer))
    for one, other in zip(plain.graph.initializer, mapped.graph.initializer, strict=True):
        assert is_mapped(other) == (array_of(one).nbytes >= 1024)
        np.testing.assert_array_equal(array_of(one), array_of(other))
    assert weights.loaded(mapped).SerializeToString(deterministic=True) == plain.SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", ["gpt", "lenet"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_mapped_graph_quantizes_to_the_same_answers(
    name: str, scheme: str, exported: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = quantized(exported[name], scheme, tmp_path / "plain")
    lower_limits(monkeypatch)
    mapped = quantized(exported[name], scheme, tmp_path / "mapped")
    assert all(graph.weights for graph in mapped.manifest.graphs.values())
    for one, other in zip(answers_of(plain), answers_of(mapped), strict=True):
        for output, expected in one.items():
            np.testing.assert_array_equal(other[output], expected)


def test_fp16_infers_types_while_weights_are_in_files(exported: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    def infer(model: onnx.ModelProto, *rest: Any, **options: Any) -> onnx.ModelProto:
        assert model.ByteSize() < weights_bytes / 5, "a message that may have more than 2 GiB"
        return infer_shapes(model, *rest, **options)

    weights_bytes = weights.weight_bytes(read_model(exported["gpt"].graph_path()))
    infer_shapes = onnx.shape_inference.infer_shapes
    lower_limits(monkeypatch)
    for module in (onnx.shape_inference, float16):
        monkeypatch.setattr(module, "infer_shapes", infer)
    assert any(item.quantized for item in convert(exported["gpt"], "fp16").nodes)


def test_a_mapped_graph_is_optimized_as_any_other(
    exported: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = optimize(exported["gpt"], tmp_path / "plain.bundle")
    lower_limits(monkeypatch)
    mapped = optimize(exported["gpt"], tmp_path / "mapped.bundle")
    assert [(item.name, item.outcome, item.nodes_after) for item in plain.passes] == [
        (item.name, item.outcome, item.nodes_after) for item in mapped.passes
    ]
    assert any(item.applied for item in mapped.passes)
    assert mapped.bytes_after == pytest.approx(plain.bytes_after, rel=0.05)
    assert verify_bundle(tmp_path / "mapped.bundle")
    for one, other in zip(*(answers_of(Bundle.open(report.bundle)) for report in (plain, mapped)), strict=True):
        for output, expected in one.items():
            np.testing.assert_array_equal(other[output], expected)


def test_sensitivity_is_asked_of_mapped_graphs(
    exported: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, part = exported["gpt"], Part("int8-weights")
    labels = [item.node for item in convert(bundle, part.scheme).nodes if item.quantized][:2]
    plain = sensitivity(bundle, part, labels, None)
    lower_limits(monkeypatch)
    assert sensitivity(bundle, part, labels, None) == plain
    assert all(0 < error < 1 for error in plain.values())


def test_a_session_takes_weights_from_another_disk(
    exported: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_disk(*_: Any) -> None:
        raise OSError("Invalid cross-device link")

    lower_limits(monkeypatch)
    model = weights.read_mapped(exported["gpt"].graph_path())
    signature = exported["gpt"].graph()[1].signature
    feeds = next(inputs for _, inputs, _ in exported["gpt"].goldens())
    linked = weights.open_model(model, signature).run(feeds)
    monkeypatch.setattr(weights.os, "link", other_disk)
    copied = weights.open_model(model, signature).run(feeds)
    np.testing.assert_array_equal(linked["logits"], copied["logits"])


def test_missing_weights_of_a_large_graph_are_named(
    exported: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "alone.onnx"
    path.write_bytes(exported["gpt"].graph_path().read_bytes())
    lower_limits(monkeypatch)
    for read in (read_model, weights.read_mapped):
        with pytest.raises(SourceError, match=r"needs the weights file 'weights.data' beside it"):
            read(path)
