"""GoogLeNet (Szegedy et al., "Going deeper with convolutions", 2015), with the batch norm of Ioffe and Szegedy (2015).

An Inception module runs four branches side by side and joins their channels: 1x1; 1x1 then 3x3; 1x1 then a larger window;
3x3 max pooling then 1x1. As in torchvision, the larger window is 3x3 too where the paper has 5x5: its published weights were
trained so, and the names and shapes of the weights are torchvision's.

The paper's two auxiliary heads only help training and are left out; when a published state dict carries their weights
(`aux1.`, `aux2.`), these are dropped on loading. Those published weights expect pixels scaled to -1 … 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor, nn

from runtime.errors import OptionError

from .images import check_image_config, check_sizes, image_classifier, initialize_for_relu

# Channels of one Inception module: 1x1 | 1x1, 3x3 | 1x1, larger window | after pooling.
ModuleWidths = tuple[int, ...]

_IMAGENET_STAGES: tuple[tuple[ModuleWidths, ...], ...] = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


@dataclass(frozen=True)
class GoogLeNetConfig:
    in_channels: int = 3
    image_size: int = 224
    classes: int = 1000
    dropout: float = 0.2
    stem: tuple[int, ...] = (64, 64, 192)  # channels of the first three convolutions
    stem_kernel: int = 7  # of the first one, whose stride is 2
    stem_pool: bool = True  # whether max pooling follows the first and the third
    stages: tuple[tuple[ModuleWidths, ...], ...] = _IMAGENET_STAGES  # max pooling between them halves the side

    def __post_init__(self) -> None:
        check_sizes(self, "stem", "stem_kernel", "stages")
        if len(self.stem) != 3 or any(len(widths) != 6 for stage in self.stages for widths in stage):
            raise OptionError(f"stem {self.stem} must have 3 numbers, and each module of stages {self.stages} 6")
        check_image_config(self, network="GoogLeNet", smallest=2 ** (len(self.stages) + 2 * self.stem_pool))


class NormedConvolution(nn.Module):
    """relu(batch_norm(convolution(x)))"""

    def __init__(self, *, before: int, after: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(after, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


class Inception(nn.Module):
    def __init__(self, *, before: int, widths: ModuleWidths) -> None:
        super().__init__()
        single, reduce2, after2, reduce3, after3, after_pool = widths
        self.branch1 = NormedConvolution(before=before, after=single, kernel=1)
        self.branch2 = nn.Sequential(
            NormedConvolution(before=before, after=reduce2, kernel=1),
            NormedConvolution(before=reduce2, after=after2, kernel=3),
        )
        self.branch3 = nn.Sequential(
            NormedConvolution(before=before, after=reduce3, kernel=1),
            NormedConvolution(before=reduce3, after=after3, kernel=3),
        )
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(kernel_size=3, stride=1, padding=1),
            NormedConvolution(before=before, after=after_pool, kernel=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)]
        return torch.cat(branches, dim=1)  # (batch, sum of the branches' channels, side, side)


def joined_channels(widths: ModuleWidths) -> int:
    single, _, after2, _, after3, after_pool = widths
    return single + after2 + after3 + after_pool


class GoogLeNet(nn.Module):
    def __init__(self, config: GoogLeNetConfig) -> None:
        super().__init__()
        first, second, channels = config.stem
        self.conv1 = NormedConvolution(before=config.in_channels, after=first, kernel=config.stem_kernel, stride=2)
        self.maxpool1 = _halving_pool(3) if config.stem_pool else nn.Identity()
        self.conv2 = NormedConvolution(before=first, after=second, kernel=1)
        self.conv3 = NormedConvolution(before=second, after=channels, kernel=3)
        self.maxpool2 = _halving_pool(3) if config.stem_pool else nn.Identity()
        self.order: list[str] = []
        for number, stage in enumerate(config.stages, start=3):  # the stem is stages 1 and 2
            if number > 3:
                self._append(f"maxpool{number - 1}", _halving_pool(3 if number == 4 else 2))
            for letter, widths in zip(ascii_lowercase, stage, strict=False):
                self._append(f"inception{number}{letter}", Inception(before=channels, widths=widths))
                channels = joined_channels(widths)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(config.dropout)
        self.fc = nn.Linear(channels, config.classes)
        initialize_for_relu(self)
        self.register_load_state_dict_pre_hook(_drop_auxiliary_heads)

    def _append(self, name: str, module: nn.Module) -> None:
        self.order.append(name)
        self.add_module(name, module)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.maxpool1(self.conv1(pixels))  # (batch, 64, side / 4, side / 4) at ImageNet size
        x = self.maxpool2(self.conv3(self.conv2(x)))  # (batch, 192, side / 8, side / 8)
        for name in self.order:
            x = self.get_submodule(name)(x)
        return self.fc(self.dropout(self.avgpool(x).flatten(1)))  # (batch, classes)


def _halving_pool(kernel: int) -> nn.MaxPool2d:
    return nn.MaxPool2d(kernel, stride=2, ceil_mode=True)


def _drop_auxiliary_heads(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith((f"{prefix}aux1.", f"{prefix}aux2."))]:
        del state[key]


_SMALL = GoogLeNetConfig(
    in_channels=1,
    image_size=32,
    classes=10,
    stem=(16, 16, 24),
    stem_kernel=3,
    stem_pool=False,
    stages=(((16, 12, 16, 4, 8, 8),), ((24, 24, 48, 8, 16, 16),), ((32, 32, 64, 8, 16, 16),)),
)

GOOGLENETS = (
    image_classifier(
        name="googlenet",
        description="GoogLeNet (Inception), 224x224 images",
        config=GoogLeNetConfig(),
        build=GoogLeNet,
        head="fc",
    ),
    image_classifier(
        name="googlenet-small",
        description="Inception blocks, 32x32 or 28x28",
        config=_SMALL,
        build=GoogLeNet,
        head="fc",
    ),
)
