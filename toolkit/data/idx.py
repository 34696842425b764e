"""IDX files, the format of MNIST: two zero bytes, a type, a number of axes, their sizes (big-endian), then the values."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DataError

from .dataset import Dataset

PARTS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> NDArray[Any]:
    """The array in an IDX file, gzipped or plain."""
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); copy or download it again") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES or len(content) < 4 + 4 * content[3]:
        raise DataError(f"{path} is not an IDX file; expected two zero bytes, a type and the sizes of its axes")
    axes = content[3]
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    dtype = np.dtype(_TYPES[content[2]])
    held, expected = len(content) - 4 - 4 * axes, math.prod(shape) * dtype.itemsize
    if held != expected:
        raise DataError(
            f"{path} holds {held} bytes of values, but its shape {list(shape)} needs {expected}; it is cut or altered"
        )
    return np.frombuffer(content, dtype, offset=4 + 4 * axes).reshape(shape).astype(dtype.newbyteorder("="))


def is_idx_folder(path: Path) -> bool:
    return any(_find(path, part) for part in PARTS)


def load_idx_folder(path: Path, *, name: str | None = None, labels: tuple[str, ...] | None = None) -> Dataset:
    """The four files of MNIST and its like. Their test images stay the test part."""
    files = {part: _find(path, part) for part in PARTS}
    if missing := [part for part, file in files.items() if file is None]:
        raise DataError(f"{path} has no {' or '.join(missing)}; expected the four files {', '.join(PARTS)}, gzipped or not")
    images: list[NDArray[np.uint8]] = []
    classes: list[NDArray[np.uint8]] = []
    for part, file in files.items():
        assert file is not None
        array = read_idx(file)
        axes = 3 if "images" in part else 1
        if array.ndim != axes or array.dtype != np.uint8:
            raise DataError(f"{file} holds {array.dtype}{list(array.shape)}; expected bytes with {axes} axes")
        (images if axes == 3 else classes).append(array)
    for part, pixels, numbers in zip(("train", "t10k"), images, classes, strict=True):
        if len(pixels) != len(numbers):
            raise DataError(f"{path} has {len(pixels)} {part} images but {len(numbers)} labels; they are not of one data set")
    if images[0].shape[1:] != images[1].shape[1:] or not all(map(len, images)):
        raise DataError(f"{path} has images of {list(images[0].shape)} and {list(images[1].shape)}; expected some of one size")
    targets = np.concatenate(classes).astype(np.int64)
    count = int(targets.max()) + 1
    if labels is not None and count > len(labels):
        raise DataError(f"{path} has the class {count - 1}, but there are {len(labels)} labels; it is not {name}")
    if len(np.unique(targets)) < 2:
        raise DataError(f"{path} holds a single class; there is nothing to learn to tell apart")
    return Dataset(
        name=name or path.name,
        task="classification",
        kind="image",
        inputs=np.concatenate(images, dtype=np.float32)[:, None],
        targets=targets,
        labels=labels or tuple(map(str, range(count))),
        test_rows=len(images[1]),
    )


def _find(folder: Path, part: str) -> Path | None:
    """Some copies have a full stop in the name: train-images.idx3-ubyte."""
    names = (part, part.replace("-idx", ".idx"))
    return next((file for name in names for end in ("", ".gz") if (file := folder / f"{name}{end}").is_file()), None)
