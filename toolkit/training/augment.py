"""Changes to a batch of raw images that leave its labels true. Random numbers come from the epoch's own generator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Augmentation:
    """What may happen to each image, anew in every epoch. The values of [training] in a recipe."""

    shift: int = 0  # pixels in both directions
    rotate: float = 0.0  # degrees to either side
    flip: bool = False  # left and right, for every second image
    crop: float = 0.0  # up to this share of each side is cut away, and the rest enlarged
    noise: float = 0.0  # deviation of added noise, in deviations of the pixels

    def __bool__(self) -> bool:
        return any((self.shift, self.rotate, self.flip, self.crop, self.noise))

    def __call__(self, images: Tensor, generator: torch.Generator, deviation: Tensor) -> Tensor:
        """(batch, channels, height, width) in and out; `deviation` of the raw pixels, one a channel."""
        if self.flip:
            images = flip(images, generator)
        if self.rotate or self.crop:
            images = rotate_and_crop(images, self.rotate, self.crop, generator)
        if self.shift:
            images = shift(images, self.shift, generator)
        if self.noise:
            random = torch.randn(images.shape, generator=generator)
            images = images + self.noise * deviation.reshape(-1, 1, 1) * random
        return images


def shift(images: Tensor, pixels: int, generator: torch.Generator) -> Tensor:
    """Move each image by up to `pixels` in both directions, filling with zeros."""
    batch, channels, height, width = images.shape
    padded = functional.pad(images, (pixels,) * 4)
    offsets = torch.randint(0, 2 * pixels + 1, (2, batch), generator=generator)
    rows = offsets[0][:, None] + torch.arange(height)  # (batch, height)
    columns = offsets[1][:, None] + torch.arange(width)  # (batch, width)
    sample = torch.arange(batch)[:, None, None, None]
    channel = torch.arange(channels)[None, :, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror every second image or so."""
    mirrored = torch.randint(0, 2, (len(images), 1, 1, 1), generator=generator, dtype=torch.bool)
    return torch.where(mirrored, images.flip(-1), images)


def rotate_and_crop(images: Tensor, degrees: float, crop: float, generator: torch.Generator) -> Tensor:
    """Turn each image about its middle and look at a random part of it, at the old size; outside is zero."""
    batch, _, height, width = images.shape
    draw = torch.rand((4, batch), generator=generator)
    angle = (2 * draw[0] - 1) * math.radians(degrees)
    side = 1 - crop * draw[1]  # of the part that stays
    centre = (2 * draw[2:] - 1) * (1 - side)
    ratio = height / width
    cosine, sine = side * torch.cos(angle), side * torch.sin(angle)
    rows = [torch.stack([cosine, -sine * ratio, centre[0]], dim=-1), torch.stack([sine / ratio, cosine, centre[1]], dim=-1)]
    grid = functional.affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
