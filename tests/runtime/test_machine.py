"""What the runtime knows and does about the machine's memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_FREED = """
from pathlib import Path
from runtime.machine import give_back_memory

def resident():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)

blocks = [bytes([number % 256]) * 100_000 for number in range(3000)]
last = blocks[-1]  # at the end of the heap, which can therefore not shrink
del blocks
before = resident()
give_back_memory()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are not asked")
def test_freed_memory_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 200_000  # of 300 MB
