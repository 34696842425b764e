"""Changes to a batch of raw images that leave its labels true. Random numbers come from the epoch's own generator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def shift(images: Tensor, pixels: int, generator: torch.Generator) -> Tensor:
    """Move each image by up to `pixels` in both directions, filling with zeros. (batch, channels, height, width)"""
    batch, channels, height, width = images.shape
    padded = functional.pad(images, (pixels,) * 4)
    offsets = torch.randint(0, 2 * pixels + 1, (2, batch), generator=generator)
    rows = offsets[0][:, None] + torch.arange(height)  # (batch, height)
    columns = offsets[1][:, None] + torch.arange(width)  # (batch, width)
    sample = torch.arange(batch)[:, None, None, None]
    channel = torch.arange(channels)[None, :, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
