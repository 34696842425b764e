"""What `--scheme auto` proposes to try. Conversions are real; latency and quality are made up from what became of the nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from exporters.adopt import adopt
from exporters.candidates import Candidate, Measured, Setting
from exporters.exploration import Exploration, _fewest_to_leave_out
from exporters.preference import Preference
from exporters.quantize import Budget, Quality
from exporters.quantized_graphs import convert_parts
from exporters.quantizers.scheme import NodeDecision
from runtime.bundle import Bundle
from runtime.errors import EdgekitError
from runtime.metrics import METRICS
from runtime.statistics import Estimate

from ..helpers import make_model, save

CHANNELS, SIZE = 40, 6
Nodes = Sequence[NodeDecision]


def samples() -> dict[str, Any]:
    return {"x": np.random.default_rng(1).standard_normal((128, 8, SIZE, SIZE)).astype(np.float32)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A narrow convolution, a wide one, and two products, of which the second is too small for any scheme but the halves."""
    random = np.random.default_rng(0)

    def weights(*shape: int) -> Any:
        return (random.standard_normal(shape) / 8).astype(np.float32)

    nodes = [
        helper.make_node("Conv", ["x", "N"], ["a"], name="narrow", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "C"], ["c"], name="wide", pads=[1] * 4),
        helper.make_node("GlobalAveragePool", ["c"], ["d"]),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("Gemm", ["e", "P", "p"], ["f"], name="product"),
        helper.make_node("Relu", ["f"], ["g"]),
        helper.make_node("MatMul", ["g", "S"], ["y"], name="small"),
    ]
    known = {
        "N": weights(CHANNELS, 8, 3, 3),
        "C": weights(CHANNELS, CHANNELS, 3, 3),
        "P": weights(CHANNELS, 128),
        "p": weights(128),
        "S": weights(128, 7),
    }
    shape = (TensorProto.FLOAT, ["batch", 8, SIZE, SIZE])
    model = make_model(nodes, known, inputs={"x": shape}, outputs={"y": (TensorProto.FLOAT, ["batch", 7])})
    folder = tmp_path_factory.mktemp("exploration")
    return adopt(save(model, folder / "net.onnx"), folder / "net.bundle").bundle


@dataclass
class MadeUp:
    """Stands for the laboratory, which would time every candidate."""

    setting: Setting
    ratio: Callable[[Nodes], float]
    drop: Callable[[Nodes], float]
    time_for: Callable[[MadeUp], bool] = lambda self: True
    told: Callable[[Measured], Measured] = lambda found: found  # may know better
    original_us: float | None = 100.0
    results: dict[str, tuple[Candidate, Measured]] = field(default_factory=dict)

    def has_time_for(self, candidates: float) -> bool:
        return self.time_for(self)

    def measure(self, candidate: Candidate) -> Measured:
        if candidate.key not in self.results:
            self.results[candidate.key] = candidate, self.told(self._measured(candidate))
        return self.results[candidate.key][1]

    def _measured(self, candidate: Candidate) -> Measured:
        setting = self.setting
        try:
            nodes = convert_parts(setting.bundle, candidate.parts, setting.calibration).nodes
        except EdgekitError as error:
            return Measured(candidate.label, problem=str(error))
        bits = {"int4-weights": 5, "fp16": 16, "bf16": 16}
        size = sum(node.weights * (bits.get(node.scheme or "", 8) if node.quantized else 32) // 8 for node in nodes)
        ratio = self.ratio(nodes)
        return Measured(candidate.label, size, Estimate(ratio, ratio - 0.005, ratio + 0.005), 0.0, self.drop(nodes), nodes)


def explored(
    bundle: Bundle, ratio: Callable[[Nodes], float], drop: Callable[[Nodes], float] = lambda nodes: 0.0, **options: Any
) -> Exploration:
    quality = Quality(METRICS["tensors"], lambda variant: 100.0, "samples")
    setting = Setting(bundle, quality, lambda graph: iter([samples()]), 1, (1,), False)
    laboratory: Any = MadeUp(setting, ratio, drop, **options)
    exploration = Exploration(laboratory, Preference(Budget(), allowed=1.0), lambda line: None)
    exploration.run()
    return exploration


def labels(exploration: Exploration) -> list[str]:
    return [found.label for found in exploration.tried()]


def static_is_fast(nodes: Nodes) -> float:
    gains = {"int8-static": 0.2, "int8-weights": 0.03, "int4-weights": 0.02, "int8-dynamic": -0.3}
    return 1.0 - sum(gains.get(node.scheme or "", 0.0) for node in nodes if node.quantized)


def test_the_fastest_scheme_is_tried_without_each_operator_and_without_narrow_convolutions(bundle: Bundle) -> None:
    tried = explored(bundle, static_is_fast)
    assert {
        "int8-static without Conv",
        "int8-static without Gemm",
        "int8-static without convolutions of under 32 channels",
    } <= set(labels(tried))
    known = {found.label: {node.node for node in found.nodes if node.quantized} for found in tried.tried()}
    assert known["int8-static"] == {"narrow", "wide", "product"}
    assert known["int8-static without convolutions of under 32 channels"] == {"wide", "product"}
    assert known["int8-static without Gemm"] == {"narrow", "wide"}


def test_a_scheme_is_joined_by_another_one_on_what_it_leaves(bundle: Bundle) -> None:
    tried = explored(bundle, static_is_fast)
    (mix,) = [found for found in tried.tried() if found.label == "int4-weights + int8-static"]
    schemes = {node.node: node.scheme for node in mix.nodes if node.quantized}
    assert schemes == {"product": "int4-weights", "narrow": "int8-static", "wide": "int8-static"}


def test_what_makes_it_slower_is_joined_to_nothing(bundle: Bundle) -> None:
    def static_is_slow(nodes: Nodes) -> float:
        return 1.5 if any(node.scheme == "int8-static" for node in nodes) else static_is_fast(nodes)

    assert not [label for label in labels(explored(bundle, static_is_slow)) if "+ int8-static" in label]


def costs(node: str, scheme: str, drop: float = 5.0) -> Callable[[Nodes], float]:
    return lambda nodes: drop if any(item.node == node and item.scheme == scheme for item in nodes) else 0.1


def test_a_node_that_costs_too_much_is_left_to_another_scheme(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"narrow": 0.01, "wide": 0.02, "product": 0.5}
    monkeypatch.setattr("exporters.exploration.sensitivity", lambda *_, **__: errors)
    tried = explored(bundle, static_is_fast, costs("product", "int8-static"))
    (pruned,) = [found for found in tried.tried() if found.label == "int8-static without 1 node + int8-weights"]
    assert {node.node for node in pruned.nodes if node.scheme == "int8-static"} == {"narrow", "wide"}
    assert pruned.drop <= 1.0


def test_nodes_are_left_out_of_what_loses_least_of_those_as_fast(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporters.exploration.sensitivity", lambda *_, **__: {"narrow": 0.01, "wide": 0.02, "product": 0.5})

    def told(found: Measured) -> Measured:
        return replace(found, drop=1.5) if found.label == "int8-static (ranges=mse)" else found

    tried = labels(explored(bundle, static_is_fast, costs("product", "int8-static"), told=told))
    assert [label for label in tried if label.startswith("int8-static (ranges=mse) without 1 node")]


def test_no_scheme_takes_over_from_itself_with_other_settings(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"narrow": 0.01, "wide": 0.02, "product": 0.5}
    monkeypatch.setattr("exporters.exploration.sensitivity", lambda *_, **__: errors)

    def told(found: Measured) -> Measured:
        is_better = found.label == "int8-static (ranges=mse)"
        return replace(found, drop=0.1, ratio=Estimate(0.5, 0.495, 0.505)) if is_better else found

    tried = labels(explored(bundle, static_is_fast, costs("product", "int8-static"), told=told))
    assert any("int8-static without 1 node" in label for label in tried)
    assert not [label for label in tried if label.count("int8-static") > 1]


def test_twice_as_many_nodes_are_left_out_until_it_is_good_enough(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporters.exploration.sensitivity", lambda *_, **__: {"narrow": 0.5, "wide": 0.4, "product": 0.01})
    tried = labels(explored(bundle, static_is_fast, costs("wide", "int8-static", 1.2)))
    assert [label.partition(" +")[0] for label in tried if "node" in label and "stored" not in label] == [
        "int8-static without 1 node",
        "int8-static without 2 nodes",
    ]


def test_what_is_left_in_float32_is_stored_in_16_bits(bundle: Bundle) -> None:
    tried = explored(bundle, static_is_fast)
    stored = [found for found in tried.tried() if found.label.endswith("+ fp16 stored")]
    assert stored
    assert all(
        {node.node for node in found.nodes if node.quantized} == {"narrow", "wide", "product", "small"} for found in stored
    )


def test_time_that_is_up_while_nodes_are_looked_at_is_told(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporters.exploration.sensitivity", lambda *_, stop, **__: {})
    assert not explored(bundle, static_is_fast, costs("product", "int8-static")).is_complete
    assert explored(bundle, static_is_fast).is_complete


def test_time_that_is_up_ends_every_stage(bundle: Bundle) -> None:
    tried = explored(bundle, static_is_fast, time_for=lambda laboratory: len(laboratory.results) < 2)
    assert labels(tried) == ["int8-static", "int8-weights"]
    assert not tried.is_complete
    assert tried.untried() == ("int8-dynamic", "int4-weights", "fp16", "bf16")


def test_as_few_nodes_are_left_out_as_bring_the_error_down_to_the_share_that_is_allowed() -> None:
    assert _fewest_to_leave_out([4.0, 3.0, 0.0], 0.65) == 1  # 3 of 5 are left
    assert _fewest_to_leave_out([4.0, 3.0, 0.0], 0.5) == 2
    assert _fewest_to_leave_out([1.0, 1.0], 1.0) == 1, "one at least"
    assert _fewest_to_leave_out([float("inf"), float("inf"), 1.0], 0.5) == 2, "those that cannot be quantized at all"
