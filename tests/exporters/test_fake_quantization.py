"""What a network computes in training for a scheme is what the quantized graph computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, nn

from architectures import raw_input
from architectures.catalog import find
from exporters.export import export
from exporters.fake_quantization import Blocks, InputRange, attach, hold_ranges, left_out, remove, rounded
from exporters.quantized_graphs import convert
from exporters.quantizers.blocks import block_size, pack, unpack
from exporters.quantizers.rounding import GPTQ, HQQ, NEAREST, WeightSettings
from exporters.source import from_architecture
from runtime.bundle import Bundle
from runtime.errors import OptionError, UnknownName
from runtime.state import specified

# the function


def test_gradients_pass_straight_through_inside_the_range_and_are_zero_outside() -> None:
    x = torch.tensor([-9.0, -1.26, 0.0, 0.49, 3.2, 9.0], requires_grad=True)
    y = rounded(x, torch.tensor(0.5), torch.tensor(3.0), 0, 10)  # -1.5 … 3.5 in steps of a half
    assert y.tolist() == [-1.5, -1.5, 0.0, 0.5, 3.0, 3.5]
    (y * torch.arange(1.0, 7.0)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2, 3, 4, 5, 0]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from([4, 8]), st.integers(1, 300), st.sampled_from([1e-3, 1.0, 50.0]))
def test_blocks_are_the_bits_that_the_scheme_stores(seed: int, bits: int, width: int, size: float) -> None:
    weight = (np.random.default_rng(seed).standard_normal((3, width)) * size).astype(np.float32)
    weight[1] = 0
    expected = unpack(pack(weight, bits, block_size(width)), width)
    np.testing.assert_array_equal(Blocks(bits)(torch.from_numpy(weight)).numpy(), expected)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([16, 48, 128, 200]), st.sampled_from([NEAREST, HQQ, GPTQ]))
def test_weights_on_the_grid_stay_whichever_way_they_are_rounded_again(seed: int, width: int, rounding: str) -> None:
    from exporters.quantizers.rounding import rounded as stored

    random = np.random.default_rng(seed)
    inputs = random.standard_normal((500, width))
    moments = inputs.T @ inputs if rounding == GPTQ else None
    weight = Blocks(4)(torch.from_numpy(random.standard_normal((8, width)).astype(np.float32))).numpy()
    again = unpack(stored(weight, 4, WeightSettings(rounding=rounding), moments), width)
    np.testing.assert_allclose(again, weight, atol=1e-5)


# attached and removed


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 3))


def test_removing_leaves_the_plain_network_with_weights_as_they_were_computed_with() -> None:
    module, x = network(), torch.randn(5, 64)
    names = set(module.state_dict())
    assert attach(module, "int4-weights") == ("0.weight", "2.weight")  # the last layer is too small for the scheme
    fake = module(x)
    assert not torch.allclose(fake, network()(x), atol=1e-3)
    remove(module)
    assert set(module.state_dict()) == names
    assert torch.equal(module(x), fake)
    assert type(module[0]) is nn.Linear
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_removing_takes_the_rounding_of_inputs_away_too() -> None:
    module, x = network(), torch.randn(5, 64)
    attach(module, "int8-static")
    fake = module.train()(x)
    remove(module)
    assert not module[0]._forward_pre_hooks
    assert not torch.equal(module(x), fake)
    assert torch.allclose(module(x), fake, atol=0.02)


def test_a_range_grows_at_once_shrinks_slowly_and_can_be_held() -> None:
    observed = InputRange()
    assert torch.equal(observed.eval()(torch.tensor([0.3])), torch.tensor([0.3]))  # nothing is known yet
    observed.train()
    for values in ([-1.0, 2.0], [-4.0, 0.0]):
        observed(torch.tensor(values))
    assert (float(observed.low), float(observed.high)) == (-4.0, pytest.approx(1.98))
    module = nn.Sequential(observed)
    hold_ranges(module, held=True)
    assert float(module(torch.tensor([50.0]))) == pytest.approx(1.98, abs=0.02)
    hold_ranges(module, held=False)
    assert float(module(torch.tensor([50.0]))) == pytest.approx(50, abs=0.2)


def test_what_a_network_has_not_for_a_scheme_is_told() -> None:
    with pytest.raises(UnknownName, match="no scheme that a network can be trained for named 'int8-dynamic'.*int4-weights"):
        attach(network(), "int8-dynamic")
    with pytest.raises(OptionError, match="nothing to train for; it has no matrix of 1024 or more weights"):
        attach(nn.Linear(8, 8), "int8-static")
    with pytest.raises(OptionError, match="nothing to train for; its weights are kernels, which int8-static takes"):
        attach(nn.Conv2d(8, 8, 3), "int4-weights")


def test_recurrent_layers_are_named_among_what_is_left_out() -> None:
    left = left_out(find("lstm").build(find("lstm").configure({"hidden": 64})), "int4-weights")
    assert left == ("recurrent.layers.0.0",)


@pytest.mark.parametrize("scheme", ["int8-static", "int8-weights"])
def test_an_output_layer_that_is_the_embedding_is_not_among_what_is_left_out(scheme: str) -> None:
    assert left_out(build("gpt"), scheme) == ()


# against the quantized graph

TINY: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": "48,40"},
    "lstm": {"vocabulary": 160, "embedding": 32, "hidden": 48, "tied": True},
    "gpt": {"width": 48, "heads": 2, "layers": 1, "feedforward": 64, "vocabulary": 160, "max_positions": 96},
    "bert": {"width": 48, "heads": 2, "layers": 1, "feedforward": 64, "vocabulary": 160, "max_positions": 96},
    "transformer": {
        "width": 32,
        "heads": 2,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "feedforward": 64,
        "vocabulary": 160,
        "target_vocabulary": 144,
        "max_positions": 96,
    },
}


ON_TOKENS = ("bert", "gpt", "lstm", "transformer")


def build(name: str) -> nn.Module:
    architecture = find(name)
    return architecture.build(architecture.configure(TINY[name]))


@pytest.fixture(params=sorted(TINY.keys() - {"lstm"}))  # whose recurrent weights training does not see
def on_the_grid(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """The bundle of a fresh network whose weights fake quantization has rounded to four bits."""

    def build_rounded(*about: Any) -> Any:
        module, specs = raw_input.build_network(*about)
        attach(module, "int4-weights")
        remove(module)
        return module, specs

    monkeypatch.setattr("exporters.source.build_network", build_rounded)
    return export(from_architecture(request.param, TINY[request.param]), tmp_path / "fp32.bundle").bundle


def in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same weights; MatMulNBits must not round what it multiplies them with."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    return model


def test_the_exported_network_answers_as_its_four_bit_graph(on_the_grid: Bundle) -> None:
    """Bits, blocks and ties are those of the scheme: nothing is left for it to round."""
    converted = convert(on_the_grid, "int4-weights")
    sessions = {
        name: ort.InferenceSession(in_float32(model).SerializeToString(), providers=["CPUExecutionProvider"])
        for name, model in converted.models.items()
    }
    for entry, inputs, expected in on_the_grid.goldens():
        names = [value.name for value in sessions[entry.graph].get_outputs()]
        outputs = dict(zip(names, sessions[entry.graph].run(names, dict(inputs)), strict=True))
        answers = specified(on_the_grid.graph(entry.graph)[1].signature.states, outputs)
        for name, reference in expected.items():
            if reference.dtype.kind == "f" and reference.size:
                assert np.abs(answers[name] - reference).max() <= 2e-5 * max(1.0, np.abs(reference).max()), (entry.graph, name)


def stored_weights(model: onnx.ModelProto) -> Iterator[NDArray[Any]]:
    """The int8 weights of a QDQ graph, as the numbers they stand for, tables of embeddings among them."""
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in tensors and tensors[node.input[0]].dtype == np.int8:
            numbers, scale = tensors[node.input[0]].astype(np.float32), tensors[node.input[1]]
            axis = next((item.i for item in node.attribute if item.name == "axis"), 0)
            shape = [-1 if at == axis and scale.ndim else 1 for at in range(numbers.ndim)]
            yield numbers * scale.reshape(shape)
        elif node.op_type == "Gather" and (columns := tensors.get(f"{node.input[0]}.column")) is not None:
            yield tensors[node.input[0]] * columns


@pytest.mark.parametrize("name", ["mlp", "lenet", "gpt"])
def test_kept_weights_are_those_of_the_static_scheme(name: str, tmp_path: Path) -> None:
    source = from_architecture(name, TINY.get(name))
    module = plain(source.graphs[0].module)
    bundle = export(source, tmp_path / "fp32.bundle").bundle
    converted = convert(bundle, "int8-static", calibration=samples_of(bundle))
    stored = [weight for model in converted.models.values() for weight in stored_weights(model)]
    taken = attach(module, "int8-static")
    assert len(taken) > 1
    for weight in set(taken) - {"features.0.weight"}:  # LeNet's first convolution is left in float32 by the scheme
        mine = module.get_submodule(weight.rpartition(".")[0]).weight.detach().numpy()
        assert any(same(mine, other) or same(mine.T, other) for other in stored), weight


def plain(module: nn.Module) -> nn.Module:
    """The network without what exporting has put around it."""
    return getattr(module, "network", module)


def samples_of(bundle: Bundle) -> Callable[[str], list[dict[str, NDArray[Any]]]]:
    goldens = [(entry.graph, dict(inputs)) for entry, inputs, _ in bundle.goldens()]
    return lambda graph: [inputs for name, inputs in goldens if name == graph]


def same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return left.shape == right.shape and bool(np.allclose(left, right, rtol=1e-6, atol=1e-8))


@pytest.mark.parametrize("name", ["mlp", *ON_TOKENS])
def test_a_network_answers_as_its_static_graph(name: str, tmp_path: Path) -> None:
    source = from_architecture(name, TINY[name])
    bundle = export(source, tmp_path / "fp32.bundle").bundle
    samples = samples_of(bundle)
    network = plain(source.graphs[0].module)
    attached = copy.deepcopy(network)
    attach(attached, "int8-static")
    ranges = {key: part for key, part in attached.named_modules() if isinstance(part, InputRange)}
    models = convert(bundle, "int8-static", calibration=samples).models
    arguments = {graph.name: graph for graph in source.graphs}

    def answers(graph: str, inputs: dict[str, NDArray[Any]]) -> Tensor:
        given = [torch.from_numpy(inputs[key]) for key in arguments[graph].inputs]
        with torch.no_grad():
            outputs = arguments[graph].module(*given)
        return outputs if isinstance(outputs, Tensor) else next(output for output in outputs if output.is_floating_point())

    exact = {graph: [] for graph in models}
    with followed(network, ranges):  # in float32, as calibration sees it
        for graph in models:
            exact[graph] = [answers(graph, inputs) for inputs in samples(graph)]
    attach(network, "int8-static")
    network.eval().load_state_dict(attached.state_dict())
    for graph, model in models.items():
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_outputs()]
        apart, cost = 0.0, 0.0
        for inputs, before in zip(samples(graph), exact[graph], strict=True):
            outputs = session.run(names, inputs)
            quantized = torch.from_numpy(next(output for output in outputs if output.dtype.kind == "f"))
            apart += float(((answers(graph, inputs) - quantized) ** 2).sum())
            cost += float(((before - quantized) ** 2).sum())
        assert cost > 0
        assert apart < 0.1**2 * cost  # a value in the middle between two numbers may go either way


@contextmanager
def followed(network: nn.Module, ranges: dict[str, InputRange]) -> Iterator[None]:
    """Let each of `ranges` have the extremes of what its place of the plain network multiplies."""

    def widen(part: InputRange, x: Tensor) -> None:
        low, high = (x.amin(), x.amax()) if x.numel() else (part.low, part.high)
        part.low.copy_(torch.minimum(part.low, low))
        part.high.copy_(torch.maximum(part.high, high))
        part.seen.fill_(True)

    hooks = []
    for key, part in ranges.items():
        place, _, kind = key.rpartition(".")
        module = network.get_submodule(place)
        if kind == "input_range":
            hooks.append(module.register_forward_pre_hook(lambda _, inputs, part=part: widen(part, inputs[0])))
        else:
            hooks.append(module.register_forward_hook(lambda _, inputs, output, part=part: widen(part, output)))
    yield
    for hook in hooks:
        hook.remove()
