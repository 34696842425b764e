"""The user's own images: a folder with one folder a class, `cats/1.png`, `dogs/2.jpg`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DataError, MissingDependency

from .dataset import Dataset

_GREY = ("1", "L", "LA", "I;16", "I;16B", "I;16L")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def load_folder(path: Path, *, size: int) -> Dataset:
    classes = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if len(classes) < 2:
        raise DataError(f"{path} has {len(classes)} folders, expected one folder of images for each of two or more classes")
    files = []
    for number, folder in enumerate(classes):
        found = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
        if not found:
            raise DataError(f"{folder} holds no images; expected files ending in {', '.join(SUFFIXES)}")
        files += [(file, number) for file in found]
    mode = "L" if all(_open(file, header_only=True).mode in _GREY for file, _ in files) else "RGB"
    inputs = np.stack([_pixels(_open(file), mode, size, size) for file, _ in files])  # one full-size image at a time
    targets = np.array([number for _, number in files], dtype=np.int64)
    return Dataset(path.name, "classification", "image", inputs, targets, tuple(folder.name for folder in classes))


def read_image(path: Path, *, channels: int, height: int, width: int) -> NDArray[np.float32]:
    """One image as (channels, height, width) raw pixels of 0 to 255, resized if it has another size."""
    if channels not in (1, 3):
        raise DataError(f"the model takes {channels} channels, and an image file gives 1 or 3; pass an .npz instead")
    return _pixels(_open(path), "L" if channels == 1 else "RGB", height, width)


def _open(path: Path, *, header_only: bool = False) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingDependency.of("pillow", "data", "reading images") from None
    try:
        with Image.open(path) as image:
            if not header_only:
                image.load()
            if image.mode in ("I", "F"):
                raise DataError(f"{path} has pixels of mode {image.mode}, whose range is unknown; save it with 8 or 16 bits")
            return image.copy() if not header_only else image
    except Image.DecompressionBombError:
        raise DataError(f"{path} has too many pixels to be opened safely; make it smaller first") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else "it is not an image, or is cut short"
        raise DataError(f"{path} cannot be read: {reason}; remove or replace it") from None


def _pixels(image: Any, mode: str, height: int, width: int) -> NDArray[np.float32]:
    from PIL import Image

    if image.mode.startswith("I;16"):  # Pillow would clip 16 bits to 8 rather than scale them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert(mode)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.float32)
    return pixels[None] if mode == "L" else np.ascontiguousarray(pixels.transpose(2, 0, 1))
