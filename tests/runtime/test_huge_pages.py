"""Weights in large pages: asked for only where they are large, and only for what a session allocated."""

from __future__ import annotations

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


def test_what_is_allocated_within_is_asked_for_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(huge_pages, "_collapse", lambda start, end: asked.append(end - start))
    earlier = np.ones(8 << 20)  # 64 MB that were there before
    with in_huge_pages():
        weights = np.ones(4 << 20)
    if sys.platform == "linux":
        assert any(size >= weights.nbytes for size in asked)
        assert sum(asked) < earlier.nbytes
    else:
        assert not asked


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="this system has no large pages")
def test_the_memory_is_moved_and_its_contents_stay() -> None:
    before = huge_bytes()
    with in_huge_pages():
        weights = np.arange(8 << 20, dtype=np.float64)
    if huge_bytes() == before:
        pytest.skip("the kernel had no memory in one piece, or is older than 6.1")
    assert huge_bytes() - before >= weights.nbytes // 2
    np.testing.assert_array_equal(weights, np.arange(8 << 20, dtype=np.float64))
