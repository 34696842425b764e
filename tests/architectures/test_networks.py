"""Our networks against independent arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.signal import correlate
from torch import nn

from architectures.catalog import CATALOG, find
from architectures.lenet import LeNet, LeNetConfig
from architectures.linear import Affine
from architectures.mlp import MLP
from architectures.raw_input import Preprocessing, RawInputNetwork, build_network
from architectures.settings import apply_settings, parse_settings
from runtime.errors import OptionError, UnknownName


def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().double().numpy() for name, tensor in module.state_dict().items()}


def test_affine_is_wx_plus_b() -> None:
    module = Affine(features=6, outputs=2)
    x = np.random.default_rng(0).standard_normal((5, 2, 3))
    w = weights_of(module)
    expected = x.reshape(5, 6) @ w["linear.weight"].T + w["linear.bias"]
    np.testing.assert_allclose(module(torch.tensor(x, dtype=torch.float32)).detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_mlp_is_relu_layers() -> None:
    module = MLP(features=6, hidden=(5, 4), outputs=3, dropout=0.5).eval()
    x = np.random.default_rng(0).standard_normal((7, 6))
    w = weights_of(module)
    hidden = x
    for index in (0, 3):
        hidden = np.maximum(0, hidden @ w[f"layers.{index}.weight"].T + w[f"layers.{index}.bias"])
    expected = hidden @ w["output.weight"].T + w["output.bias"]
    np.testing.assert_allclose(module(torch.tensor(x, dtype=torch.float32)).detach().numpy(), expected, rtol=1e-4, atol=1e-6)


def test_dropout_acts_in_training_only() -> None:
    module = MLP(features=6, hidden=(64,), outputs=3, dropout=0.5)
    x = torch.randn(2, 6)
    assert not torch.equal(module.train()(x), module(x))
    assert torch.equal(module.eval()(x), module(x))


def test_lenet_equals_correlation_and_averaging_by_hand() -> None:
    module = LeNet(in_channels=1, image_size=32, classes=10).eval()
    image = np.random.default_rng(0).standard_normal((1, 32, 32))
    w = weights_of(module)
    x = image
    for index in (0, 3):
        kernels, bias = w[f"features.{index}.weight"], w[f"features.{index}.bias"]
        maps = np.stack(
            [
                sum(correlate(x[c], kernel[c], "valid") for c in range(len(x))) + b
                for kernel, b in zip(kernels, bias, strict=True)
            ]
        )
        maps = np.tanh(maps)
        x = maps.reshape(len(maps), maps.shape[1] // 2, 2, maps.shape[2] // 2, 2).mean(axis=(2, 4))
    x = x.reshape(-1)
    for index in (0, 2, 4):
        x = w[f"classifier.{index}.weight"] @ x + w[f"classifier.{index}.bias"]
        x = np.tanh(x) if index < 4 else x
    actual = module(torch.tensor(image[None], dtype=torch.float32)).detach().numpy()[0]
    np.testing.assert_allclose(actual, x, rtol=1e-4, atol=1e-5)


def test_lenet_has_the_papers_number_of_weights() -> None:
    assert CATALOG["lenet"].parameters() == 61_706


@pytest.mark.parametrize("name", ["linear", "mlp", "lenet", "resnet-small", "gru", "transformer", "bert", "gpt"])
def test_counting_parameters_equals_building(name: str) -> None:
    architecture = find(name)
    assert architecture.parameters() == sum(p.numel() for p in architecture.build(architecture.config).parameters())


def test_raw_input_normalises_resizes_and_restores_the_targets_unit() -> None:
    about = Preprocessing("image", (1, 8, 8), mean=(5.0,), deviation=(2.0,), target_mean=10.0, target_deviation=3.0)
    inner = nn.Flatten()
    module = RawInputNetwork(inner, about, 32)
    raw = torch.rand(2, 1, 8, 8) * 16
    expected = nn.functional.interpolate((raw - 5) / 2, size=(32, 32), mode="bilinear").flatten(1) * 3 + 10
    torch.testing.assert_close(module(raw), expected)


@pytest.mark.parametrize(("side", "wanted"), [(8, 32), (30, 32), (33, 32), (7, 32), (100, 32), (31, 29)])
def test_constant_resize_factors_give_exactly_the_wanted_size(side: int, wanted: int) -> None:
    module = RawInputNetwork(nn.Identity(), Preprocessing("image", (1, side, side), (0.0,), (1.0,)), wanted)
    assert module(torch.zeros(1, 1, side, side)).shape == (1, 1, wanted, wanted)


def test_preprocessing_survives_json() -> None:
    about = Preprocessing("columns", (2,), (1.0, 2.0), (1.0, 1.0), columns=("a", "b"))
    import json

    assert Preprocessing.from_json(json.loads(json.dumps(about.to_json()))) == about


def test_channels_must_fit() -> None:
    architecture = find("lenet")
    with pytest.raises(OptionError, match="takes 1 channels but the images have 3"):
        build_network(architecture, architecture.config, Preprocessing("image", (3, 8, 8), (0.0,) * 3, (1.0,) * 3))


def test_settings_are_converted_by_type() -> None:
    config = find("mlp").configure({"hidden": "32,16", "dropout": "0", "outputs": 3})
    assert (config.hidden, config.dropout, config.outputs) == ((32, 16), 0.0, 3)
    assert apply_settings(LeNetConfig(), {}) == LeNetConfig()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dropot": "0.1"}, UnknownName, "did you mean 'dropout'"),
        ({"dropout": "much"}, OptionError, "setting 'dropout' is 'much', expected a number"),
        ({"outputs": "1.5"}, OptionError, "expected a whole number"),
        ({"outputs": 1.5}, OptionError, "expected a whole number"),
        ({"outputs": True}, OptionError, "expected a whole number"),
        ({"hidden": "a,b"}, OptionError, "expected a whole number"),
        ({"hidden": 3}, OptionError, "a list such as"),
        ({"dropout": "1.5"}, OptionError, "expected 0 or more and below 1"),
        ({"dropout.x": "1"}, OptionError, "single value"),
    ],
)
def test_wrong_settings_name_the_key_and_the_type(settings: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        find("mlp").configure(settings)


def test_pairs_are_parsed() -> None:
    assert parse_settings(("a=1", "b.c = x=y")) == {"a": "1", "b.c": "x=y"}
    for bad in ("a", "=1"):
        with pytest.raises(OptionError, match="write --set key=value"):
            parse_settings((bad,))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("lenet", {"image_size": 12}),
        ("lenet", {"classes": 1}),
        ("mlp", {"hidden": "0"}),
        ("linear", {"outputs": 0}),
        ("softmax", {"classes": 1}),
    ],
)
def test_impossible_sizes_are_refused(name: str, settings: dict) -> None:
    with pytest.raises(OptionError):
        find(name).configure(settings)


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'lenet'\? known: alexnet, .*, lenet, linear, lstm, mlp, nin"):
        find("lenett")
