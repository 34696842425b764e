"""Threads follow the control group's limit, on trees as Linux shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

import runtime.machine as machine
from runtime.cgroup import allowed_cores, quota_cpus


def tree(root: Path, groups: str, **files: str) -> Path:
    """A fake root with /proc/self/cgroup and files under /sys/fs/cgroup, given by their path."""
    for name, content in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{key}": text for key, text in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/pod/box", {"pod/box/cpu.max": "400000 100000"}, 4.0),
        ("0::/pod/box", {"pod/cpu.max": "50000 100000", "pod/box/cpu.max": "max 100000"}, 0.5),
        ("0::/pod/box", {"pod/cpu.max": "300000 100000", "pod/box/cpu.max": "200000 100000"}, 2.0),
        ("0::/not/visible/here", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/../sibling", {"cpu.max": "100000 100000"}, 1.0),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 1.5),
        ("4:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3.0),
        ("4:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "50000", "cpu/box/cpu.cfs_period_us": "25000"}, 2.0),
        ("4:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu:/box\n0::/", {"cpu/box/cpu.cfs_quota_us": "700000", "cpu/box/cpu.cfs_period_us": "100000"}, 7.0),
        ("3:memory:/x", {}, None),
        ("nonsense", {"cpu.max": "what is this"}, None),
    ],
)
def test_the_quota_is_the_smallest_on_the_way_up(
    groups: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    assert quota_cpus(tree(tmp_path, groups, **files)) == quota


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {"cpuset.cpus.effective": "0-3,8"}, 5),
        ("0::/pod", {"pod/cpuset.cpus.effective": "7", "cpuset.cpus.effective": "0-15"}, 1),
        ("2:cpuset:/box", {"cpuset/box/cpuset.cpus": "2-3", "cpuset/cpuset.cpus": "0-7"}, 2),
        ("2:cpuset:/", {"cpuset/cpuset.cpus": ""}, None),
        ("0::/", {"cpuset.cpus.effective": "all of them"}, None),
        ("0::/", {}, None),
    ],
)
def test_the_set_of_cores_is_counted(groups: str, files: dict[str, str], cores: int | None, tmp_path: Path) -> None:
    assert allowed_cores(tree(tmp_path, groups, **files)) == cores


def test_a_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert quota_cpus(tmp_path) is None
    assert allowed_cores(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "cores", "threads"),
    [(1.5, None, 2), (0.25, None, 1), (4.0, 3, 3), (None, 5, 5), (None, None, 16), (99.0, 99, 16)],
)
def test_a_part_of_a_core_rounds_up_and_the_tightest_limit_wins(
    quota: float | None, cores: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "quota_cpus", lambda: quota)
    monkeypatch.setattr(machine, "allowed_cores", lambda: cores)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert machine.available_cpus() == threads
