"""optimize on real exports: what is fused in each graph, and what of the bundle must stay as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import exporters.optimize
import runtime
from exporters.adopt import adopt
from exporters.export import export
from exporters.heads import Head
from exporters.optimize import OptimizeReport, optimize
from exporters.pace import Pace
from exporters.profiles import ONNXRUNTIME, PORTABLE
from exporters.source import find_source
from runtime.bundle import Bundle
from runtime.statistics import Estimate
from runtime.verify import verify_bundle

SMALL = {"width": 16, "heads": 2, "feedforward": 24, "vocabulary": 40, "max_positions": 48}
LAYERS = {"bert": {"layers": 2}, "gpt": {"layers": 2}, "transformer": {"encoder_layers": 2, "decoder_layers": 1}}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    torch.manual_seed(0)
    made = {}
    for name, profile in (("bert", None), ("gpt", PORTABLE), ("gpt", ONNXRUNTIME), ("transformer", PORTABLE)):
        network = find_source(name, SMALL | LAYERS[name], profile=profile)
        label = f"{name}-{profile}" if profile else name
        made[label] = export(network, folder / f"{label}.bundle").bundle
    return made


def matches(report: OptimizeReport, graph: str) -> dict[str, int]:
    assert not [item.outcome for item in report.passes if item.outcome.startswith("reverted")]
    return {item.name: item.matches for item in report.passes if item.graph == graph and item.matches}


def operators(bundle: Bundle) -> set[str]:
    return set(bundle.manifest.requirements["operators"])


def test_an_encoder_is_fused(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    report = optimize(bundles["bert"], tmp_path / "out.bundle")
    assert matches(report, "model") == {
        "fuse-attention": 2,
        "pack-projections": 2,
        "fuse-bias-gelu": 3,
        "fuse-skip-layernorm": 5,
    }
    assert verify_bundle(tmp_path / "out.bundle")
    assert "Softmax" not in operators(Bundle.open(tmp_path / "out.bundle"))


def test_a_decoder_with_growing_caches_is_fused_and_keeps_its_states(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    before = bundles["gpt-portable"]
    report = optimize(before, tmp_path / "out.bundle")
    assert matches(report, "decoder") == {
        "fuse-attention": 2,
        "pack-projections": 2,
        "fuse-bias-gelu": 2,
        "fuse-skip-layernorm": 5,
    }
    after = Bundle.open(tmp_path / "out.bundle")
    assert after.graph()[1].signature == before.graph()[1].signature
    assert after.graph()[1].signature.states
    assert after.manifest.generation == before.manifest.generation
    assert verify_bundle(after.root)


def test_a_decoder_with_caches_in_place_is_fused_around_its_attention(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    report = optimize(bundles["gpt-onnxruntime"], tmp_path / "out.bundle")
    assert matches(report, "decoder") == {
        "pack-projections": 2,
        "pack-attention": 2,
        "fuse-bias-gelu": 2,
        "fuse-skip-layernorm": 3,  # not in the last layer, where only the wanted positions go on
    }
    assert verify_bundle(tmp_path / "out.bundle")


def test_every_graph_of_a_bundle_is_fused_and_shared_weights_stay_shared(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    before = bundles["transformer-portable"]
    report = optimize(before, tmp_path / "out.bundle")
    assert matches(report, "encoder")["fuse-attention"] == 2
    assert matches(report, "decoder")["fuse-attention"] == 2  # to itself, and to the source
    assert [graph.graph for graph in report.graphs] == ["encoder", "decoder"]
    after = Bundle.open(tmp_path / "out.bundle")
    assert {name: graph.weights for name, graph in after.manifest.graphs.items()} == {
        name: graph.weights for name, graph in before.manifest.graphs.items()
    }
    assert any(graph.weights for graph in after.manifest.graphs.values())
    assert after.graph_bytes < before.graph_bytes * 1.02
    assert verify_bundle(after.root)


@pytest.mark.parametrize("name", ["bert", "gpt-portable"])
def test_a_portable_graph_has_standard_operators_only(name: str, bundles: dict[str, Bundle], tmp_path: Path) -> None:
    report = optimize(bundles[name], tmp_path / "out.bundle", portable=True)
    assert {item.name for item in report.passes}.isdisjoint({"fuse-attention", "fuse-bias-gelu", "fuse-skip-layernorm"})
    assert next(item for item in report.passes if item.name == "pack-projections").matches == 2
    assert not [item for item in operators(Bundle.open(tmp_path / "out.bundle")) if "::" in item]


def test_a_head_on_a_decoder_keeps_its_states(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    before = bundles["gpt-portable"]
    optimize(before, tmp_path / "out.bundle", head=Head(2))
    after = Bundle.open(tmp_path / "out.bundle")
    signature = after.graph()[1].signature
    assert [spec.name for spec in signature.outputs[:2]] == ["top.logprobs", "top.tokens"]
    assert signature.states == before.graph()[1].signature.states
    assert after.manifest.task == "language-model"
    assert verify_bundle(after.root)


def test_a_classifier_with_a_head_promises_tensors(tmp_path: Path) -> None:
    bundle = export(find_source("softmax"), tmp_path / "in.bundle").bundle
    assert bundle.manifest.task == "classification"
    optimize(bundle, tmp_path / "out.bundle", head=Head())
    assert Bundle.open(tmp_path / "out.bundle").manifest.task == "tensors"


def test_weights_kept_outside_stay_outside(tmp_path: Path) -> None:
    bundle = export(find_source("mlp"), tmp_path / "in.bundle", external_data=True).bundle
    assert bundle.graph()[1].weights
    optimize(bundle, tmp_path / "out.bundle")
    after = Bundle.open(tmp_path / "out.bundle")
    assert after.graph()[1].weights == bundle.graph()[1].weights
    assert verify_bundle(after.root)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_graph_from_elsewhere_is_fused(implementation: str, tmp_path: Path) -> None:
    """GPT-2 as another library writes it: Gemms between reshapes, GELU written out, other masks."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    network = Logits(transformers.GPT2LMHeadModel(config)).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    example = (torch.randint(1, 40, (2, 7)), torch.ones(2, 7, dtype=torch.long))
    program = torch.onnx.export(
        network,
        example,
        dynamo=True,
        verbose=False,
        opset_version=20,
        input_names=["tokens", "mask"],
        output_names=["logits"],
        dynamic_shapes=({0: "batch", 1: "time"}, {0: "batch", 1: "time"}),
    )
    assert program is not None
    onnx.save(program.model_proto, str(tmp_path / "gpt2.onnx"))
    bundle = adopt(tmp_path / "gpt2.onnx", tmp_path / "in.bundle").bundle
    report = optimize(bundle, tmp_path / "out.bundle")
    assert matches(report, "model") == {
        "fuse-gelu": 2,
        "fuse-attention": 2,
        "gemm-to-matmul": 8,
        "fuse-bias-gelu": 2,
        "fuse-skip-layernorm": 4,
    }
    assert verify_bundle(tmp_path / "out.bundle")
    assert report.graphs[0].nodes_after < 0.6 * report.graphs[0].nodes_before
    random = np.random.default_rng(0)
    mask = (random.random((3, 9)) < 0.7).astype(np.int64)
    mask[:, 0] = 1
    feeds = {"tokens": random.integers(0, 40, (3, 9)), "mask": mask}
    first, second = (runtime.load(path).run(feeds)["logits"] for path in (bundle.root, tmp_path / "out.bundle"))
    np.testing.assert_allclose(second, first, rtol=1e-4, atol=1e-4)


class Logits(torch.nn.Module):
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.network(input_ids=tokens, attention_mask=mask, use_cache=False).logits


def test_a_doubtful_pass_must_be_faster_even_where_the_graph_is_tied_already(
    bundles: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    even = (Pace("batch=1", Estimate(10.0, 9.9, 10.1), Estimate(10.0, 9.9, 10.1), Estimate(1.0, 0.995, 1.005)),)
    monkeypatch.setattr(exporters.optimize, "compare_pace", lambda *_, **options: even)
    report = optimize(bundles["gpt-onnxruntime"], tmp_path / "out.bundle", timing=True)
    outcomes = {item.name: item.outcome for item in report.passes if item.matches}
    assert outcomes.pop("fuse-skip-layernorm").startswith("reverted: not faster (1.00 of the time at best)")
    assert set(outcomes.values()) == {"applied"}
