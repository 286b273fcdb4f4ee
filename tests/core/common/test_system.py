import os

import pytest

from core.common.system import _core_quotas, _free_bytes_in_cgroups, usable_cores


@pytest.mark.parametrize(
    ("line", "top", "limit", "usage", "cache"),
    [
        ("0::/a/b", "", "memory.max", "memory.current", "inactive_file"),
        ("4:memory:/a/b", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_limits_of_all_enclosing_control_groups_count(tmp_path, line, top, limit, usage, cache):
    (tmp_path / "cgroup").write_text(f"1:cpu:/elsewhere\n{line}\n")
    for folder, most, used in (("", "max", "9999"), ("a", "1000", "700"), ("a/b", "5000", "600")):
        group = tmp_path / "mount" / top / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / limit).write_text(f"{most}\n")
        (group / usage).write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"cache 5\n{cache} 200\nrss 3\n")
    assert sorted(_free_bytes_in_cgroups(tmp_path / "cgroup", tmp_path / "mount")) == [500, 4600]
    assert _free_bytes_in_cgroups(tmp_path / "absent", tmp_path / "mount") == []


@pytest.mark.parametrize(
    ("line", "top", "files"),
    [
        ("0::/a/b", "", {"": {}, "a": {"cpu.max": "250000 100000"}, "a/b": {"cpu.max": "max 100000"}}),
        (
            "4:cpu,cpuacct:/a/b",
            "cpu",
            {
                "": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"},
                "a": {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"},
                "a/b": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"},
            },
        ),
    ],
)
def test_the_quotas_of_all_enclosing_control_groups_limit_the_cores(tmp_path, monkeypatch, line, top, files):
    (tmp_path / "cgroup").write_text(f"1:memory:/elsewhere\n{line}\n")
    for folder, contents in files.items():
        group = tmp_path / "mount" / top / folder
        group.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (group / name).write_text(f"{text}\n")
    assert _core_quotas(tmp_path / "cgroup", tmp_path / "mount") == [3]
    monkeypatch.setattr("core.common.system.MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr("core.common.system.MOUNT", tmp_path / "mount")
    for cores in (2, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert usable_cores() == min(cores, 3)
