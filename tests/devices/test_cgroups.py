from __future__ import annotations

from pathlib import Path

import pytest

from stoker.devices.cpu import CgroupLimits, read_limits


def write(path: Path, text: str) -> None:
    """Make a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_2_limits_of_a_container(tmp_path):
    """Inside a container the group is the root of what is mounted, and both limits are read."""
    write(tmp_path / "cpu.max", "150000 100000\n")
    write(tmp_path / "memory.max", "2147483648\n")
    assert read_limits("0::/\n", tmp_path) == CgroupLimits(cpus=1.5, memory_bytes=2 * 2**30)


def test_the_tightest_of_the_groups_around_holds(tmp_path):
    """A pod's limit counts though the process is in a group inside it that is allowed more."""
    write(tmp_path / "pod" / "cpu.max", "400000 100000\n")
    write(tmp_path / "pod" / "memory.max", "1000000\n")
    write(tmp_path / "pod" / "box" / "cpu.max", "800000 100000\n")
    write(tmp_path / "pod" / "box" / "memory.max", "3000000\n")
    assert read_limits("0::/pod/box\n", tmp_path) == CgroupLimits(cpus=4.0, memory_bytes=1_000_000)


def test_version_1_limits(tmp_path):
    """Version 1 keeps CPU and memory in mounts of their own, named by their controllers."""
    write(tmp_path / "cpu,cpuacct" / "batch" / "cpu.cfs_quota_us", "800000\n")
    write(tmp_path / "cpu,cpuacct" / "batch" / "cpu.cfs_period_us", "100000\n")
    write(tmp_path / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "memory" / "batch" / "memory.limit_in_bytes", "34359738368\n")
    membership = "11:memory:/batch\n4:cpu,cpuacct:/batch\n1:name=systemd:/batch\n"
    assert read_limits(membership, tmp_path) == CgroupLimits(cpus=8.0, memory_bytes=32 * 2**30)


def test_version_1_group_named_as_on_the_host(tmp_path):
    """In a container without a namespace of groups the path is the host's and absent: the mount's own files count."""
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "200000\n")
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000\n")
    assert read_limits("3:cpu:/docker/0123abcd\n", tmp_path) == CgroupLimits(cpus=2.0)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"cpu.max": "max 100000\n", "memory.max": "max\n"},
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        {"memory/memory.limit_in_bytes": "9223372036854771712\n"},
        {"cpu.max": "", "memory.max": "what\n"},
    ],
)
def test_no_limit_is_none(tmp_path, files):
    """Every way of writing 'no limit', and of not saying, is None and never a number."""
    for name, text in files.items():
        write(tmp_path / name, text)
    assert read_limits("9:memory:/\n3:cpu:/\n0::/\nnot a line of groups\n", tmp_path) == CgroupLimits()
