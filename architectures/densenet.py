"""DenseNet (Huang, Liu, van der Maaten and Weinberger, "Densely connected convolutional networks", 2017).

Layer l of a block sees all feature maps before it: x_l = H([x_0, …, x_(l-1)]), where H is batch norm, ReLU and a 1x1
convolution to `4 growth` channels, then batch norm, ReLU and a 3x3 convolution to `growth` channels. Between blocks a
transition halves the channels (1x1 convolution) and the side (average pooling). The names and shapes of the weights are
torchvision's; its older files, which write `norm.1` for `norm1`, load as well.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .images import check_image_config, check_sizes, image_classifier, initialize_for_relu

_BOTTLENECK = 4  # channels of a layer's 1x1 convolution over its growth


@dataclass(frozen=True)
class DenseNetConfig:
    in_channels: int = 3
    image_size: int = 224
    classes: int = 1000
    dropout: float = 0.0  # after each dense layer
    growth: int = 32  # feature maps that each dense layer adds
    blocks: tuple[int, ...] = (6, 12, 24, 16)  # dense layers in each block
    stem: int = 64  # channels before the first block
    stem_kernel: int = 7  # of the first convolution, whose stride is 2
    stem_pool: bool = True  # whether max pooling halves the side again after it

    def __post_init__(self) -> None:
        check_sizes(self, "growth", "blocks", "stem", "stem_kernel")
        check_image_config(self, network="DenseNet", smallest=2 ** (len(self.blocks) + self.stem_pool))


class DenseLayer(nn.Module):
    def __init__(self, *, before: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, _BOTTLENECK * growth, kernel_size=1, bias=False)
        self.norm2 = nn.BatchNorm2d(_BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(_BOTTLENECK * growth, growth, kernel_size=3, padding=1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(torch.relu(self.norm1(x)))  # (batch, 4 growth, side, side)
        y = self.dropout(self.conv2(torch.relu(self.norm2(y))))  # (batch, growth, side, side)
        return torch.cat([x, y], dim=1)  # (batch, before + growth, side, side)


def dense_block(*, before: int, layers: int, growth: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            (f"denselayer{index + 1}", DenseLayer(before=before + index * growth, growth=growth, dropout=dropout))
            for index in range(layers)
        )
    )


def transition(*, before: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(before),
            relu=nn.ReLU(),
            conv=nn.Conv2d(before, before // 2, kernel_size=1, bias=False),
            pool=nn.AvgPool2d(2),
        )
    )


class DenseNet(nn.Module):
    def __init__(self, config: DenseNetConfig) -> None:
        super().__init__()
        channels, kernel = config.stem, config.stem_kernel
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(config.in_channels, channels, kernel, stride=2, padding=kernel // 2, bias=False),
            norm0=nn.BatchNorm2d(channels),
            relu0=nn.ReLU(),
        )
        if config.stem_pool:
            layers["pool0"] = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        for number, depth in enumerate(config.blocks, start=1):
            layers[f"denseblock{number}"] = dense_block(
                before=channels, layers=depth, growth=config.growth, dropout=config.dropout
            )
            channels += depth * config.growth
            if number < len(config.blocks):
                layers[f"transition{number}"] = transition(before=channels)
                channels //= 2
        layers["norm5"] = nn.BatchNorm2d(channels)
        layers["relu5"] = nn.ReLU()
        self.features = nn.Sequential(layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, config.classes)
        initialize_for_relu(self, fan="fan_in")
        nn.init.zeros_(self.classifier.bias)
        self.register_load_state_dict_pre_hook(_rename_old_keys)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.features(pixels)  # (batch, channels, side / 32, side / 32)
        return self.classifier(self.avgpool(x).flatten(1))  # (batch, classes)


_OLD_KEY = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")


def _rename_old_keys(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Modules once could have dots in their names, and the published files still have them."""
    for key in [key for key in state if _OLD_KEY.search(key)]:
        state[_OLD_KEY.sub(r"\1\2.", key)] = state.pop(key)


_VARIANTS = {
    "densenet121": DenseNetConfig(growth=32, blocks=(6, 12, 24, 16), stem=64),
    "densenet161": DenseNetConfig(growth=48, blocks=(6, 12, 36, 24), stem=96),
    "densenet169": DenseNetConfig(growth=32, blocks=(6, 12, 32, 32), stem=64),
    "densenet201": DenseNetConfig(growth=32, blocks=(6, 12, 48, 32), stem=64),
}
_SMALL = DenseNetConfig(
    in_channels=1, image_size=32, classes=10, growth=8, blocks=(3, 4, 4), stem=16, stem_kernel=3, stem_pool=False
)

DENSENETS = tuple(
    image_classifier(name=name, description=description, config=config, build=DenseNet, head="classifier")
    for name, config, description in (
        *((name, config, f"DenseNet-{name[8:]}, 224x224 images") for name, config in _VARIANTS.items()),
        ("densenet-small", _SMALL, "dense blocks, 32x32 or 28x28"),
    )
)
