"""The convolutional families against published counts and names, and their blocks against arithmetic written here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from architectures.architecture import DataFacts
from architectures.catalog import CATALOG, find
from architectures.densenet import DenseLayer, DenseNet, DenseNetConfig, dense_block, transition
from architectures.googlenet import Inception
from architectures.images import smallest_image
from architectures.nin import NiN, NiNConfig
from architectures.resnet import BasicBlock, Bottleneck
from architectures.vgg import VGG, VGGConfig
from runtime.errors import OptionError

PUBLISHED_PARAMETERS = {  # of torchvision's models, auxiliary heads aside
    "alexnet": 61_100_840,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vgg11-bn": 132_868_840,
    "vgg13-bn": 133_053_736,
    "vgg16-bn": 138_365_992,
    "vgg19-bn": 143_678_248,
    "googlenet": 6_624_904,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
}
IMAGENET = [*PUBLISHED_PARAMETERS, "nin"]
ONE_OF_EACH = ["alexnet", "vgg11-bn", "nin", "googlenet", "resnet18", "resnet50", "densenet121"]  # for what takes time
SMALL = ["alexnet-small", "vgg-small", "nin-small", "googlenet-small", "resnet-small", "densenet-small"]

# Every key of a published state dict, as a pattern, with the number of tensors it holds.
PUBLISHED_KEYS = {
    "alexnet": (r"features\.(0|3|6|8|10)\.(weight|bias)|classifier\.(1|4|6)\.(weight|bias)", 16),
    "vgg11": (r"features\.(0|3|6|8|11|13|16|18)\.(weight|bias)|classifier\.(0|3|6)\.(weight|bias)", 22),
    "vgg11-bn": (
        r"features\.(0|4|8|11|15|18|22|25)\.(weight|bias)"
        r"|features\.(1|5|9|12|16|19|23|26)\.(weight|bias|running_mean|running_var|num_batches_tracked)"
        r"|classifier\.(0|3|6)\.(weight|bias)",
        62,
    ),
    "googlenet": (
        r"(conv[123]|inception(3[ab]|4[a-e]|5[ab])\.(branch1|branch[23]\.[01]|branch4\.1))"
        r"\.(conv\.weight|bn\.(weight|bias|running_mean|running_var|num_batches_tracked))"
        r"|fc\.(weight|bias)",
        344,
    ),
    "resnet18": (
        r"(layer[1-4]\.[01]\.)?(conv[12]\.weight|bn[12]\.(weight|bias|running_mean|running_var|num_batches_tracked))"
        r"|layer[234]\.0\.downsample\.(0\.weight|1\.(weight|bias|running_mean|running_var|num_batches_tracked))"
        r"|fc\.(weight|bias)",
        122,
    ),
    "resnet50": (
        r"(layer[1-4]\.[0-5]\.)?(conv[123]\.weight|bn[123]\.(weight|bias|running_mean|running_var|num_batches_tracked))"
        r"|layer[1-4]\.0\.downsample\.(0\.weight|1\.(weight|bias|running_mean|running_var|num_batches_tracked))"
        r"|fc\.(weight|bias)",
        320,
    ),
    "densenet121": (
        r"features\.(conv0\.weight|(norm0|norm5|transition[123]\.norm|denseblock[1-4]\.denselayer\d+\.norm[12])"
        r"\.(weight|bias|running_mean|running_var|num_batches_tracked)"
        r"|transition[123]\.conv\.weight|denseblock[1-4]\.denselayer\d+\.conv[12]\.weight)"
        r"|classifier\.(weight|bias)",
        727,
    ),
}
PUBLISHED_SHAPES = {
    "alexnet": {"features.0.weight": (64, 3, 11, 11), "classifier.1.weight": (4096, 9216)},
    "vgg16": {"features.28.weight": (512, 512, 3, 3), "classifier.0.weight": (4096, 25088)},
    "googlenet": {"inception3a.branch2.0.conv.weight": (96, 192, 1, 1), "inception5b.branch3.1.conv.weight": (128, 48, 3, 3)},
    "resnet34": {"layer2.0.downsample.0.weight": (128, 64, 1, 1)},
    "resnet50": {"layer1.0.downsample.0.weight": (256, 64, 1, 1), "layer4.2.conv2.weight": (512, 512, 3, 3)},
    "densenet121": {
        "features.denseblock1.denselayer1.norm1.weight": (64,),
        "features.denseblock4.denselayer16.conv1.weight": (128, 992, 1, 1),
        "features.transition3.conv.weight": (512, 1024, 1, 1),
    },
}


def build_on_meta(name: str, **changes: Any) -> nn.Module:
    architecture = find(name)
    with torch.device("meta"):
        return architecture.build(replace(architecture.config, **changes)).eval()


def with_random_statistics(module: nn.Module, seed: int = 0) -> nn.Module:
    """In evaluation mode, with batch norms that are not the identity and linear layers that do not shrink the signal."""
    generator = torch.Generator().manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.3, generator=generator)  # type: ignore[union-attr]
            layer.running_var.uniform_(0.5, 2, generator=generator)  # type: ignore[union-attr]
            layer.weight.data.uniform_(0.5, 1.5, generator=generator)
            layer.bias.data.normal_(0, 0.3, generator=generator)
        elif isinstance(layer, nn.Linear):
            layer.weight.data.normal_(0, layer.in_features**-0.5, generator=generator)
    return module.eval()


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    assert find(name).parameters() == PUBLISHED_PARAMETERS[name]


def test_nin_has_the_weights_of_its_twelve_convolutions() -> None:
    blocks = [(3, 96, 11), (96, 256, 5), (256, 384, 3), (384, 1000, 3)]
    expected = sum(k * k * before * after + after + 2 * (after * after + after) for before, after, k in blocks)
    assert find("nin").parameters() == expected


@pytest.mark.parametrize("name", PUBLISHED_KEYS)
def test_state_dict_keys_are_torchvisions(name: str) -> None:
    pattern, tensors = PUBLISHED_KEYS[name]
    keys = list(build_on_meta(name).state_dict())
    assert [key for key in keys if not re.fullmatch(pattern, key)] == []
    assert len(keys) == tensors


@pytest.mark.parametrize("name", PUBLISHED_SHAPES)
def test_weights_have_torchvisions_shapes(name: str) -> None:
    state = build_on_meta(name).state_dict()
    assert {key: tuple(state[key].shape) for key in PUBLISHED_SHAPES[name]} == PUBLISHED_SHAPES[name]


def test_auxiliary_heads_of_a_published_googlenet_are_dropped_on_loading() -> None:
    module = find("googlenet-small").build(find("googlenet-small").config)
    published = module.state_dict() | {"aux1.conv.conv.weight": torch.zeros(1), "aux2.fc2.bias": torch.zeros(1)}
    module.load_state_dict(published)
    assert "aux1.conv.conv.weight" in published  # the caller's dictionary is left as it was
    with pytest.raises(RuntimeError, match="aux3"):
        module.load_state_dict(module.state_dict() | {"aux3.bias": torch.zeros(1)})


@pytest.mark.parametrize("prefix", ["", "network."])
def test_old_names_in_published_densenets_load(prefix: str) -> None:
    config = find("densenet-small").config
    source, target = with_random_statistics(DenseNet(config)), DenseNet(config).eval()
    old = {
        prefix + re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", key): tensor
        for key, tensor in source.state_dict().items()
        if not key.endswith("num_batches_tracked")  # these files are older than that buffer
    }
    assert f"{prefix}features.denseblock1.denselayer1.norm.1.weight" in old
    (nn.ModuleDict({"network": target}) if prefix else target).load_state_dict(old)
    pixels = torch.randn(2, 1, 32, 32)
    assert torch.equal(source(pixels), target(pixels))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_imagenet_networks_give_one_logit_a_class_at_other_sizes(name: str) -> None:
    for size in (193, 224, 256):
        module = build_on_meta(name, image_size=size)
        assert module(torch.empty(2, 3, size, size, device="meta")).shape == (2, 1000)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [28, 32, 45])
def test_small_networks_take_several_sizes_channels_and_classes(name: str, size: int) -> None:
    architecture = find(name)
    for channels, classes in ((1, 10), (3, 7)):
        module = architecture.build(replace(architecture.config, image_size=size, in_channels=channels, classes=classes))
        logits = module.eval()(torch.randn(2, channels, size, size))
        assert logits.shape == (2, classes)
        assert logits.isfinite().all()


@pytest.mark.parametrize("name", [*ONE_OF_EACH, *SMALL])
def test_the_smallest_accepted_image_works_and_a_smaller_one_is_refused(name: str) -> None:
    config = find(name).config
    with pytest.raises(OptionError, match="image_size is 1, but .* needs at least") as caught:
        replace(config, image_size=1)
    smallest = int(re.search(r"at least (\d+) pixels", str(caught.value))[1])  # type: ignore[index]
    module = build_on_meta(name, image_size=smallest)
    assert module(torch.empty(2, config.in_channels, smallest, smallest, device="meta")).shape == (2, config.classes)
    for impossible in (smallest - 1, 1025):
        with pytest.raises(OptionError, match=f"image_size is {impossible}"):
            replace(config, image_size=impossible)


def test_the_smallest_alexnet_image_is_the_one_whose_last_map_is_one_pixel() -> None:
    assert smallest_image(find("alexnet").config.convolutions) == 63
    features = build_on_meta("alexnet").get_submodule("features")
    assert features(torch.empty(1, 3, 63, 63, device="meta")).shape == (1, 256, 1, 1)
    with pytest.raises(RuntimeError, match="too small"):
        features(torch.empty(1, 3, 62, 62, device="meta"))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("resnet18", {"in_channels": 0}, "in_channels 0 must be 1 or more"),
        ("resnet18", {"classes": 1}, "classes 1 2 or more"),
        ("resnet-small", {"blocks": "1,2"}, "must have as many numbers, one a stage"),
        ("resnet-small", {"blocks": "1,0,1"}, r"blocks is \(1, 0, 1\), expected numbers of 1 or more"),
        ("vgg16", {"widths": "64,64"}, "must have as many numbers, one a stage"),
        ("vgg16", {"dropout": 1.0}, "dropout is 1.0, expected 0 or more and below 1"),
        ("densenet121", {"dropout": -0.1}, "dropout is -0.1"),
        ("densenet121", {"growth": 0}, "growth is 0, expected numbers of 1 or more"),
        ("googlenet", {"stem": "64,64"}, "must have 3 numbers"),
        ("googlenet", {"stages": [[[1, 2, 3]]]}, "each module of stages .* 6"),
        ("googlenet", {"stages": []}, "stages is .*, expected numbers of 1 or more"),
        ("nin", {"convolutions": [[96, 11, 4]]}, r"convolution \(96, 11, 4\) is not understood"),
        ("alexnet", {"convolutions": [[96, 11, 0, 0, 1]]}, "is not understood; expected channels, kernel, stride"),
        ("alexnet", {"convolutions": []}, "convolutions is empty"),
    ],
)
def test_impossible_tables_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        find(name).configure(settings)


@pytest.mark.parametrize("name", [*IMAGENET, *SMALL])
def test_a_configuration_survives_json(name: str) -> None:
    architecture = find(name)
    config = replace(architecture.config, classes=3)
    assert architecture.configure(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize("name", [*ONE_OF_EACH, *SMALL])
def test_it_is_fitted_to_data_and_its_head_holds_what_depends_on_the_classes(name: str) -> None:
    architecture = find(name)
    facts = DataFacts(task="classification", shape=(2, 8, 8), outputs=6)
    fitted = architecture.adapt(architecture.config, facts)
    assert (fitted.in_channels, fitted.classes, fitted.image_size) == (2, 6, architecture.config.image_size)
    one, other = (build_on_meta(name, classes=classes).state_dict() for classes in (5, 6))
    differing = {key for key in one if one[key].shape != other[key].shape}
    assert differing
    assert all(key.startswith(tuple(f"{head}." for head in architecture.head)) for key in differing)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [28, 32])
def test_in_evaluation_a_row_in_a_batch_is_the_row_alone(name: str, size: int) -> None:
    architecture = find(name)
    torch.manual_seed(0)
    module = with_random_statistics(architecture.build(replace(architecture.config, image_size=size)))
    pixels = torch.randn(5, 1, size, size)
    whole = module(pixels)
    assert whole.std(dim=0).max() > 1e-4  # rows do differ
    for row in range(5):
        torch.testing.assert_close(module(pixels[row : row + 1])[0], whole[row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_every_weight_of_a_small_network_gets_a_gradient(name: str) -> None:
    architecture = find(name)
    torch.manual_seed(0)
    module = architecture.build(architecture.config).train()
    logits = module(torch.randn(8, 1, 32, 32))
    functional.cross_entropy(logits, torch.arange(8)).backward()
    assert [key for key, weight in module.named_parameters() if weight.grad is None or not weight.grad.any()] == []


# Blocks against formulas. The arithmetic below knows convolution as a sum over shifted images, and batch norm as its equation.


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int = 1, padding: int = 0) -> Tensor:
    """y[b,o,i,j] = Σ_(c,u,v) w[o,c,u,v] x[b,c,i·stride+u,j·stride+v] (+ bias[o]), in float64."""
    x = functional.pad(x.double(), (padding,) * 4)
    kernel = weight.shape[-1]
    side = (x.shape[-1] - kernel) // stride + 1
    y = torch.zeros(len(x), len(weight), side, side, dtype=torch.float64)
    for u in range(kernel):
        for v in range(kernel):
            window = x[:, :, u : u + stride * side : stride, v : v + stride * side : stride]
            y += torch.einsum("oc,bcij->boij", weight[:, :, u, v].double(), window)
    return y if bias is None else y + bias.double()[:, None, None]


def normalize(x: Tensor, state: dict[str, Tensor], prefix: str, epsilon: float = 1e-5) -> Tensor:
    mean, variance, weight, bias = (
        state[f"{prefix}.{name}"].double()[:, None, None] for name in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (variance + epsilon).sqrt() * weight + bias


def largest_of_nine(x: Tensor) -> Tensor:
    """3x3 max pooling with stride 1 that keeps the side."""
    side = x.shape[-1]
    padded = functional.pad(x, (1, 1, 1, 1), value=-torch.inf)
    return torch.stack([padded[..., u : u + side, v : v + side] for u in range(3) for v in range(3)]).amax(0)


def relu(x: Tensor) -> Tensor:
    return x.clamp(min=0)


def basic_block_by_formula(x: Tensor, state: dict[str, Tensor], stride: int) -> Tensor:
    y = relu(normalize(convolve(x, state["conv1.weight"], stride=stride, padding=1), state, "bn1"))
    y = normalize(convolve(y, state["conv2.weight"], padding=1), state, "bn2")
    return relu(y + shortcut_by_formula(x, state, stride))


def bottleneck_by_formula(x: Tensor, state: dict[str, Tensor], stride: int) -> Tensor:
    y = relu(normalize(convolve(x, state["conv1.weight"]), state, "bn1"))
    y = relu(normalize(convolve(y, state["conv2.weight"], stride=stride, padding=1), state, "bn2"))
    y = normalize(convolve(y, state["conv3.weight"]), state, "bn3")
    return relu(y + shortcut_by_formula(x, state, stride))


def shortcut_by_formula(x: Tensor, state: dict[str, Tensor], stride: int) -> Tensor:
    if "downsample.0.weight" not in state:
        return x.double()
    return normalize(convolve(x, state["downsample.0.weight"], stride=stride), state, "downsample.1")


@pytest.mark.parametrize(
    ("block", "formula", "before", "stride", "has_shortcut_weights"),
    [
        (BasicBlock, basic_block_by_formula, 6, 1, False),
        (BasicBlock, basic_block_by_formula, 4, 1, True),
        (BasicBlock, basic_block_by_formula, 6, 2, True),
        (Bottleneck, bottleneck_by_formula, 24, 1, False),
        (Bottleneck, bottleneck_by_formula, 6, 1, True),
        (Bottleneck, bottleneck_by_formula, 24, 2, True),
    ],
)
def test_residual_blocks_add_their_input(
    block: Callable[..., nn.Module], formula: Callable[..., Tensor], before: int, stride: int, has_shortcut_weights: bool
) -> None:
    torch.manual_seed(0)
    module = with_random_statistics(block(before=before, width=6, stride=stride))
    x = torch.randn(2, before, 9, 9)
    state = module.state_dict()
    assert ("downsample.0.weight" in state) == has_shortcut_weights
    torch.testing.assert_close(module(x).double(), formula(x, state, stride), rtol=1e-4, atol=1e-5)


def dense_layer_by_formula(x: Tensor, state: dict[str, Tensor], prefix: str = "") -> Tensor:
    y = convolve(relu(normalize(x.double(), state, f"{prefix}norm1")), state[f"{prefix}conv1.weight"])
    return convolve(relu(normalize(y, state, f"{prefix}norm2")), state[f"{prefix}conv2.weight"], padding=1)


def test_a_dense_layer_appends_its_maps_to_what_it_saw() -> None:
    torch.manual_seed(0)
    module = with_random_statistics(DenseLayer(before=5, growth=3, dropout=0.0))
    x = torch.randn(2, 5, 7, 7)
    y = module(x)
    assert torch.equal(y[:, :5], x)
    torch.testing.assert_close(y[:, 5:].double(), dense_layer_by_formula(x, module.state_dict()), rtol=1e-4, atol=1e-5)


def test_each_layer_of_a_dense_block_sees_all_maps_before_it() -> None:
    torch.manual_seed(0)
    module = with_random_statistics(dense_block(before=4, layers=3, growth=2, dropout=0.0))
    x = torch.randn(2, 4, 6, 6)
    maps = [x.double()]
    for number in (1, 2, 3):
        maps.append(dense_layer_by_formula(torch.cat(maps, dim=1), module.state_dict(), f"denselayer{number}."))
    torch.testing.assert_close(module(x).double(), torch.cat(maps, dim=1), rtol=1e-4, atol=1e-5)


def test_a_transition_halves_channels_and_side() -> None:
    torch.manual_seed(0)
    module = with_random_statistics(transition(before=6))
    x = torch.randn(2, 6, 8, 8)
    y = convolve(relu(normalize(x.double(), module.state_dict(), "norm")), module.state_dict()["conv.weight"])
    expected = y.reshape(2, 3, 4, 2, 4, 2).mean(dim=(3, 5))
    torch.testing.assert_close(module(x).double(), expected, rtol=1e-4, atol=1e-5)


def test_inception_joins_four_branches() -> None:
    torch.manual_seed(0)
    module = with_random_statistics(Inception(before=5, widths=(2, 3, 4, 2, 3, 2)))
    x = torch.randn(2, 5, 6, 6)
    state = module.state_dict()

    def unit(x: Tensor, prefix: str, padding: int = 0) -> Tensor:
        return relu(normalize(convolve(x, state[f"{prefix}.conv.weight"], padding=padding), state, f"{prefix}.bn", 1e-3))

    expected = [
        unit(x, "branch1"),
        unit(unit(x, "branch2.0"), "branch2.1", padding=1),
        unit(unit(x, "branch3.0"), "branch3.1", padding=1),
        unit(largest_of_nine(x), "branch4.1"),
    ]
    torch.testing.assert_close(module(x).double(), torch.cat(expected, dim=1), rtol=1e-4, atol=1e-5)


def test_a_nin_is_perceptrons_over_windows_and_a_mean_a_class() -> None:
    torch.manual_seed(0)
    config = NiNConfig(in_channels=2, image_size=9, classes=3, convolutions=((4, 3, 2, 1, 0), (5, 3, 1, 1, 0)))
    module = NiN(config).eval()
    state = module.state_dict()
    for bias in (tensor for key, tensor in state.items() if key.endswith("bias")):
        bias.normal_(0, 0.1)
    x = torch.randn(2, 2, 9, 9)
    y = x.double()
    for block, stride in (("features.0", 2), ("features.1", 1), ("classifier", 1)):
        y = relu(convolve(y, state[f"{block}.0.weight"], state[f"{block}.0.bias"], stride=stride, padding=1))
        for layer in (2, 4):
            y = relu(convolve(y, state[f"{block}.{layer}.weight"], state[f"{block}.{layer}.bias"]))
    torch.testing.assert_close(module(x).double(), y.mean(dim=(2, 3)), rtol=1e-4, atol=1e-5)


def test_a_vgg_is_convolutions_and_halvings_then_a_perceptron() -> None:
    torch.manual_seed(0)
    config = VGGConfig(
        in_channels=2, image_size=8, classes=3, widths=(3, 4), depths=(1, 2), batch_norm=True, pooled=2, hidden=5
    )
    module = with_random_statistics(VGG(config))
    state = module.state_dict()
    for key in ("classifier.0.bias", "classifier.3.bias", "classifier.6.bias"):
        state[key].normal_(0, 0.3)
    x = torch.randn(2, 2, 8, 8)
    y = x.double()
    for index, ends_stage in ((0, True), (4, False), (7, True)):
        y = convolve(y, state[f"features.{index}.weight"], state[f"features.{index}.bias"], padding=1)
        y = relu(normalize(y, state, f"features.{index + 1}"))
        if ends_stage:
            y = y.unflatten(3, (-1, 2)).amax(4).unflatten(2, (-1, 2)).amax(3)
    y = y.flatten(1)  # two halvings of 8 leave the 2x2 that the head wants
    for index in (0, 3, 6):
        y = y @ state[f"classifier.{index}.weight"].double().T + state[f"classifier.{index}.bias"].double()
        y = relu(y) if index < 6 else y
    torch.testing.assert_close(module(x).double(), y, rtol=1e-4, atol=1e-5)


def test_convolutions_before_relu_begin_with_the_variance_two_over_fan() -> None:
    torch.manual_seed(0)
    resnet = find("resnet-small").build(find("resnet-small").config)
    weight = resnet.get_parameter("layer3.0.conv2.weight")  # (96, 96, 3, 3)
    assert weight.var().item() == pytest.approx(2 / (9 * 96), rel=0.05)
    dense = DenseNet(DenseNetConfig(growth=32, blocks=(2, 2), image_size=32))
    weight = dense.get_parameter("features.denseblock2.denselayer2.conv2.weight")  # (32, 128, 3, 3)
    assert weight.var().item() == pytest.approx(2 / (9 * 128), rel=0.05)


def test_all_names_of_the_families_are_in_the_catalogue() -> None:
    assert {*IMAGENET, *SMALL} <= set(CATALOG)
