"""Weights in large pages: asked for only where they are large, and only for what a session allocated."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime import huge_pages
from runtime.huge_pages import in_huge_pages

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes() -> int:
    """Of this process, in large pages."""
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(found.group(1)) * 1024 if found else 0


def private_memory(size: int) -> tuple[mmap.mmap, int]:
    """Memory of its own from the system, and its address."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells its regions")
def test_what_is_allocated_within_is_asked_for_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(huge_pages, "_collapse", lambda start, end: asked.append((start, end)))
    size = 32 << 20
    _earlier, before = private_memory(size)
    with in_huge_pages():
        _weights, within = private_memory(size)
    assert any(start <= within and within + size <= end for start, end in asked)
    assert not any(start < before + size and before < end for start, end in asked if end > start)


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="this system has no large pages")
def test_the_memory_is_moved_and_its_contents_stay() -> None:
    before = huge_bytes()
    with in_huge_pages():
        weights = np.arange(8 << 20, dtype=np.float64)
    if huge_bytes() == before:
        pytest.skip("the kernel had no memory in one piece, or is older than 6.1")
    assert huge_bytes() - before >= weights.nbytes // 2
    np.testing.assert_array_equal(weights, np.arange(8 << 20, dtype=np.float64))
