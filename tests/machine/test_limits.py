import os

import psutil

from chipwise.machine.limits import cores, memory

GiB = 2**30
USABLE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_control_groups_the_affinity_mask_counts(tmp_path):
    assert cores(tmp_path).usable == USABLE
    assert memory(tmp_path).total_bytes == psutil.virtual_memory().total


def test_this_host():
    assert 0 < cores().usable <= cores().machine
    assert 0 <= memory().available_bytes <= memory().total_bytes <= psutil.virtual_memory().total


def test_a_quota_of_version_2_on_any_level_binds(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/pod/container\n")
    write(tmp_path, "sys/fs/cgroup/pod/container/cpu.max", "max 100000\n")
    write(tmp_path, "sys/fs/cgroup/pod/cpu.max", "50000 100000\n")
    assert cores(tmp_path).usable == 0.5


def test_a_quota_of_version_1(tmp_path):
    write(tmp_path, "proc/self/cgroup", "4:memory:/job\n3:cpu,cpuacct:/job\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "75000\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert cores(tmp_path).usable == 0.75


def test_a_container_that_does_not_see_its_own_path(tmp_path):
    write(tmp_path, "proc/self/cgroup", "4:memory:/docker/abc\n0::/../../elsewhere\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "25000 100000\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{GiB}\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GiB // 4}\n")
    assert cores(tmp_path).usable == 0.25
    assert memory(tmp_path).total_bytes == GiB and memory(tmp_path).available_bytes == 3 * GiB // 4


def test_cached_files_of_the_group_are_available(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/a\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.max", f"{GiB}\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.current", f"{GiB}\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.stat", f"anon 5\ninactive_file {GiB // 2}\n")
    assert memory(tmp_path).available_bytes == GiB // 2


def test_an_unlimited_group_of_version_1_changes_nothing(tmp_path):
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n")
    assert memory(tmp_path).total_bytes == psutil.virtual_memory().total
