"""How many cores a Linux control group leaves to this process: its CPU quota and its set of cores.

    version 2   <mount>/<group>/cpu.max "150000 100000" or "max 100000";  cpuset.cpus.effective "0-3,8"
    version 1   <mount>/cpu/<group>/cpu.cfs_quota_us and cpu.cfs_period_us;  <mount>/cpuset/<group>/cpuset.cpus

/proc/self/cgroup names the group in each hierarchy. A limit of any group above holds as well, so all of them are read. Inside a
container the named group is often not visible below the mount, which then is the container's own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MOUNT = "sys/fs/cgroup"


def quota_cpus(root: Path = Path("/")) -> float | None:
    """The smallest CPU quota that holds for this process, in cores (1.5: one and a half); None without one."""
    quotas = []
    for folder in _folders(root, "cpu"):
        words = _words(folder / "cpu.max") or [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        quota = [int(word) for word in words[:2] if word.isdigit()]  # "max" and -1 stand for no limit
        if len(quota) == 2 and min(quota) > 0:
            quotas.append(quota[0] / quota[1])
    return min(quotas, default=None)


def allowed_cores(root: Path = Path("/")) -> int | None:
    """The size of the smallest set of cores that holds for this process; None where no group says."""
    sizes = []
    for folder in _folders(root, "cpuset"):
        words = _words(folder / "cpuset.cpus.effective") or _words(folder / "cpuset.cpus")
        if words and (size := _listed(words[0])):
            sizes.append(size)
    return min(sizes, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Every folder that may hold a limit of `controller`, from this process's group up to the mount."""
    groups = {"": "/", controller: "/"}
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        for name in controllers.split(","):
            if name in groups and ".." not in group:  # a group outside this process's namespace cannot be read
                groups[name] = group
    mount = root / _MOUNT
    hierarchies = [(mount, groups[""]), (mount / "unified", groups[""]), (mount / controller, groups[controller])]
    hierarchies += [(mount / "cpu,cpuacct", groups["cpu"])] if controller == "cpu" else []
    for base, group in hierarchies:
        path = PurePosixPath(group.strip("/"))
        for place in (path, *path.parents):
            yield base / place


def _listed(text: str) -> int:
    """ "0-3,8" → 5; 0 for what is not such a list."""
    count = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            return 0
        count += int(last or first) - int(first) + 1
    return count


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []
