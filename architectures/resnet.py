"""ResNet (He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2016).

A block gives y = relu(F(x) + x). F is two 3x3 convolutions (basic block, ResNet-18 and -34), or 1x1 to `width`, 3x3, and 1x1 to
four times `width` (bottleneck, from ResNet-50), each followed by batch norm. Where the shape changes, x passes through a 1x1
convolution with the same stride. A bottleneck's stride sits on its 3x3 convolution, which is where torchvision has it
("v1.5"); the names and shapes of the weights are torchvision's too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runtime.errors import OptionError

from .images import check_image_config, check_sizes, image_classifier, initialize_for_relu

_EXPANSION = 4  # of a bottleneck: its output channels over its width


@dataclass(frozen=True)
class ResNetConfig:
    in_channels: int = 3
    image_size: int = 224
    classes: int = 1000
    blocks: tuple[int, ...] = (2, 2, 2, 2)  # in each stage
    widths: tuple[int, ...] = (64, 128, 256, 512)  # of each stage; every stage but the first halves the side
    bottleneck: bool = False
    stem_kernel: int = 7  # of the first convolution, whose stride is 2
    stem_pool: bool = True  # whether max pooling halves the side again after it

    def __post_init__(self) -> None:
        check_sizes(self, "blocks", "widths", "stem_kernel")
        if len(self.blocks) != len(self.widths):
            raise OptionError(f"blocks {self.blocks} and widths {self.widths} must have as many numbers, one a stage")
        check_image_config(self, network="ResNet", smallest=2 ** (len(self.blocks) + self.stem_pool))


class BasicBlock(nn.Module):
    def __init__(self, *, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(before=before, after=width, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))  # (batch, width, side / stride, side / stride)
        y = self.bn2(self.conv2(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    def __init__(self, *, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = width * _EXPANSION
        self.conv1 = nn.Conv2d(before, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.downsample = _shortcut(before=before, after=after, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))  # (batch, width, side / stride, side / stride)
        y = self.bn3(self.conv3(y))  # (batch, 4 width, side / stride, side / stride)
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


def _shortcut(*, before: int, after: int, stride: int) -> nn.Sequential | None:
    """What x passes through to get the shape of F(x); None where it has that shape."""
    if stride == 1 and before == after:
        return None
    return nn.Sequential(nn.Conv2d(before, after, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(after))


class ResNet(nn.Module):
    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        channels, kernel = config.widths[0], config.stem_kernel
        self.conv1 = nn.Conv2d(config.in_channels, channels, kernel, stride=2, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1) if config.stem_pool else nn.Identity()
        block = Bottleneck if config.bottleneck else BasicBlock
        self.stages: list[str] = []
        for index, (blocks, width) in enumerate(zip(config.blocks, config.widths, strict=True)):
            layers = []
            for position in range(blocks):
                stride = 2 if index > 0 and position == 0 else 1
                layers.append(block(before=channels, width=width, stride=stride))
                channels = width * (_EXPANSION if config.bottleneck else 1)
            self.stages.append(f"layer{index + 1}")
            self.add_module(self.stages[-1], nn.Sequential(*layers))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, config.classes)
        initialize_for_relu(self)

    def forward(self, pixels: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(pixels)))  # (batch, widths[0], side / 2, side / 2)
        x = self.maxpool(x)
        for stage in self.stages:
            x = self.get_submodule(stage)(x)  # each but the first: channels doubled, side halved
        return self.fc(self.avgpool(x).flatten(1))  # (batch, classes)


_VARIANTS = {
    "resnet18": ResNetConfig(blocks=(2, 2, 2, 2)),
    "resnet34": ResNetConfig(blocks=(3, 4, 6, 3)),
    "resnet50": ResNetConfig(blocks=(3, 4, 6, 3), bottleneck=True),
    "resnet101": ResNetConfig(blocks=(3, 4, 23, 3), bottleneck=True),
    "resnet152": ResNetConfig(blocks=(3, 8, 36, 3), bottleneck=True),
}
_SMALL = ResNetConfig(
    in_channels=1, image_size=32, classes=10, blocks=(2, 2, 2), widths=(24, 48, 96), stem_kernel=3, stem_pool=False
)

RESNETS = tuple(
    image_classifier(name=name, description=description, config=config, build=ResNet, head="fc")
    for name, config, description in (
        *((name, config, f"ResNet-{name[6:]}, 224x224 images") for name, config in _VARIANTS.items()),
        ("resnet-small", _SMALL, "residual blocks, 32x32 or 28x28"),
    )
)
