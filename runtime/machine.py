"""What machine this is: the lines a latency figure means nothing without."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import sys
import time
from functools import lru_cache
from typing import Any

from .cgroup import allowed_cores, quota_cpus

_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "asimddp", "i8mm", "sve")


def available_cpus() -> int:
    """Cores this process may use: the cgroup's limit and the affinity mask, not the host's count."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota, cores = quota_cpus(), allowed_cores()
    # A part of a core rounds up: 1.5 cores are used by 2 threads, of which one waits now and then; 1 would waste a third.
    return max(1, min(count, math.ceil(quota or count), cores or count))


def cpu_features() -> list[str]:
    """The instruction sets that change how quantized kernels compute."""
    for line in _lines("/proc/cpuinfo"):
        if line.lower().startswith(("flags", "features")):
            present = set(line.split(":", 1)[1].split())
            return [flag for flag in _CPU_FLAGS if flag in present]
    return ["asimd"] if platform.machine() in ("arm64", "aarch64") else []  # every 64-bit ARM has it; others do not say


def describe_machine() -> dict[str, Any]:
    import numpy
    import onnxruntime

    return {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "available_cores": available_cpus(),
        "cgroup_cpus": quota_cpus(),
        "features": cpu_features(),
        "governor": next(iter(_lines("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")), None),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "onnxruntime": onnxruntime.__version__,
    }


def busy_share(seconds: float = 0.25) -> float | None:
    """How much of all cores other processes use, while this one waits; None where it cannot be told."""
    before = _cpu_times()
    time.sleep(seconds)
    after = _cpu_times()
    if before is None or after is None or after[1] <= before[1]:
        return None
    return 1 - (after[0] - before[0]) / (after[1] - before[1])


def _cpu_times() -> tuple[int, int] | None:
    """(idle, all) ticks of all cores since the start."""
    for line in _lines("/proc/stat"):
        if line.startswith("cpu "):
            ticks = [int(word) for word in line.split()[1:9]]
            return ticks[3] + ticks[4], sum(ticks)
    return None


def resident_bytes() -> int:
    """Memory this process holds now."""
    return _status_bytes("VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most memory this process has held.

    On Linux this is VmHWM: `ru_maxrss` survives exec, so a small child of a large parent would report the parent's peak.
    """
    if peak := _status_bytes("VmHWM"):
        return peak
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(usage if sys.platform == "darwin" else usage * 1024)


def available_memory() -> int | None:
    """Bytes that this process can still get: of the machine, or of its cgroup; None where it cannot be told.

    Looked up at most ten times a second: whoever asks before every short piece of work would wait for the answer.
    """
    return _available_memory(int(time.monotonic() * 10))


def give_back_memory() -> None:
    """What this process has freed goes back to the system, for others to use: the allocator keeps gigabytes of it otherwise."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # of glibc alone
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _available_memory(tenths: int) -> int | None:
    found = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable")]
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        found.append(max(0, int(limit[0]) - int(used[0])))
    return min(found, default=None)


def _status_bytes(key: str) -> int:
    for line in _lines("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_name() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _memory_bytes() -> int | None:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal"):
            return int(line.split()[1]) * 1024
    return None


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:  # not a Path: every generation reads some, and Path interns the parts of a name each time
            return file.read().splitlines()
    except OSError:
        return []
