"""What holds for every network of the catalogue. A new one is tested by being listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import runtime
from architectures.catalog import CATALOG
from exporters.check import check
from exporters.export import export
from exporters.optimize import optimize
from exporters.source import find_source
from runtime.bundle import Bundle
from runtime.verify import verify_bundle
from toolkit.training.recipe import load_recipe, recipe_names

PARAMETERS = {name: architecture.parameters() for name, architecture in CATALOG.items()}
SMALL = [name for name, count in PARAMETERS.items() if count < 6_000_000]  # the others are published sizes
ON_TENSORS = [name for name in SMALL if CATALOG[name].takes != ("tokens",)]
ON_TEXT = [name for name in SMALL if CATALOG[name].takes == ("tokens",)]
# Every task of a network on text, at sizes of seconds; the rest of a configuration changes sizes, not operators. Of profiles
# the usual one: test_text_export.py compares them.
TEXT_VARIANTS = [(name, {"task": task}) for name in ON_TEXT for task in CATALOG[name].tasks[1:]]
GENERATING = {"language-model", "seq2seq"}
LAWS = {"prefill = steps", "chunked = whole", "row = alone", "padding changes nothing", "reorder = recompute"}
QUICK = {"linear", "softmax", "mlp", "lenet"}  # whose recipes take seconds; the others are trained a little


@pytest.mark.parametrize("name", ON_TENSORS)
def test_it_exports_equal_to_pytorch_at_sizes_nobody_tried(name: str, tmp_path: Path) -> None:
    network = find_source(name)
    report = export(network, tmp_path / "x.bundle")
    assert len({case.sizes["batch"] for case in report.cases} - {3}) >= 5
    model = runtime.load(report.bundle.root)
    ((input_name, example),) = network.graph.inputs.items()
    fresh = torch.randn((11, *example.shape[1:]), generator=torch.Generator().manual_seed(1))
    expected = network.graph.call({input_name: fresh})
    actual = model.run({input_name: fresh.numpy()})
    for output, tensor in expected.items():
        allowed = report.tolerance[output].allowed
        np.testing.assert_allclose(actual[output], tensor.numpy(), rtol=0, atol=allowed)
    assert verify_bundle(report.bundle.root)
    assert check(report.bundle.root)
    leaner = optimize(report.bundle, tmp_path / "lean.bundle")
    assert not any(item.outcome.startswith("reverted") for item in leaner.passes)
    lean = Bundle.open(tmp_path / "lean.bundle")
    assert lean.manifest.lineage[-1]["parent"] == report.bundle.seal
    assert verify_bundle(lean.root)


def test_published_sizes_export_too(tmp_path: Path) -> None:
    """At fewer pixels and classes than ImageNet's, which a graph does not care about."""
    network = find_source("resnet18", {"image_size": 96, "classes": 10})
    report = export(network, tmp_path / "x.bundle")
    assert verify_bundle(report.bundle.root)


@pytest.mark.parametrize(
    ("name", "settings"), [*((name, {}) for name in ON_TEXT), *TEXT_VARIANTS], ids=lambda value: str(value)
)
def test_a_network_on_text_exports_and_keeps_the_laws_of_decoding(name: str, settings: dict[str, str], tmp_path: Path) -> None:
    report = export(find_source(name, settings), tmp_path / "x.bundle")
    for graph in report.graphs:
        for axis in graph.signature.dynamic_axes:
            assert len({case.sizes[axis] for case in graph.cases}) >= 5, (graph.name, axis)
    task = report.bundle.manifest.task
    assert task == settings.get("task", CATALOG[name].task)
    assert {law.law for law in report.laws} == (LAWS if task in GENERATING else set())
    assert all(report.laws)
    assert verify_bundle(report.bundle.root)
    assert check(report.bundle.root)
    leaner = optimize(report.bundle, tmp_path / "lean.bundle")
    assert not any(item.outcome.startswith("reverted") for item in leaner.passes)
    assert verify_bundle(tmp_path / "lean.bundle")


@pytest.mark.parametrize("name", SMALL)
def test_it_has_a_shared_recipe(name: str) -> None:
    assert name in recipe_names()
    assert load_recipe(name).architecture == name


@pytest.mark.parametrize("name", ON_TENSORS)
def test_a_row_in_a_batch_is_the_row_alone(name: str) -> None:
    network = find_source(name)
    ((input_name, example),) = network.graph.inputs.items()
    whole = network.graph.call({input_name: example})
    for row in range(len(example)):
        alone = network.graph.call({input_name: example[row : row + 1]})
        for output in whole:
            torch.testing.assert_close(alone[output][0], whole[output][row], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ON_TENSORS if CATALOG[name].task == "classification"])
def test_trained_and_exported_it_answers_as_pytorch_sample_by_sample(
    name: str, trained: Callable[..., Path], exported: Callable[..., Path]
) -> None:
    settings = {} if name in QUICK else {"epochs": 1}
    from architectures.run_directory import Run
    from toolkit.data.digits import load
    from toolkit.evaluation import evaluate, predict_all
    from toolkit.training.loop import predict

    data = load()
    directory = trained(name, **settings)
    run = Run.open(directory)
    module, _ = run.load(directory)
    bundle = Bundle.open(exported(name, **settings))
    np.testing.assert_array_equal(predict(module, data).argmax(-1), predict_all(bundle, data.inputs).argmax(-1))
    assert run.metrics is not None
    assert evaluate(bundle.root, None).metrics["accuracy"] == pytest.approx(run.metrics["test"])
