"""The cores of a process in a container: affinity and the quotas of control groups, versions 1 and 2."""

import os

import pytest

from runtime.worker.cpu.cores import available_cores

AFFINITY = len(os.sched_getaffinity(0))


def groups(tmp_path, own: str, files: dict[str, str]):
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    return tmp_path / "cgroup", tmp_path / "own"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, AFFINITY),
        ("0::/\n", {"cpu.max": "100000 100000"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, 1),
        ("3:cpu,cpuacct:/box\n1:name=systemd:/x\n", {"cpu/box/cpu.cfs_quota_us": "100000",
                                                     "cpu/box/cpu.cfs_period_us": "100000"}, 1),
        ("3:cpu,cpuacct:/box\n", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, AFFINITY),
        ("0::/\n", {"cpu.max": "a fault"}, AFFINITY),
        ("0::/gone\n", {}, AFFINITY),
    ],
)  # fmt: skip
def test_a_quota_limits_the_cores(tmp_path, own, files, cores):
    assert available_cores(*groups(tmp_path, own, files)) == cores


def test_a_quota_above_the_affinity_changes_nothing(tmp_path):
    assert available_cores(*groups(tmp_path, "0::/\n", {"cpu.max": "99900000 100000"})) == AFFINITY
