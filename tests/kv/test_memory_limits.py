"""What memory this process may still use, within its control groups' limits."""

from __future__ import annotations

from pathlib import Path

from quire.kv.cache.memory_limits import MemoryLimit, available_memory, cgroup_limits, memory_limit


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def write_membership(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_cgroup_v2_limits_of_the_group_and_its_parent(tmp_path: Path):
    write_membership(tmp_path, "0::/service/worker\n")
    mount = tmp_path / "sys/fs/cgroup"
    write_group(mount, memory__stat="inactive_file 0\n")  # the root has no memory.max
    write_group(
        mount / "service", memory__max="1000\n", memory__current="900\n", memory__stat="inactive_file 50\n"
    )
    write_group(
        mount / "service/worker", memory__max="max\n", memory__current="9\n", memory__stat="inactive_file 1\n"
    )
    assert cgroup_limits(tmp_path) == [MemoryLimit(1000, 150)]
    assert cgroup_limits(tmp_path)[0].in_use == 850


def test_cgroup_v1_counts_page_cache_as_free(tmp_path: Path):
    write_membership(tmp_path, "7:blkio:/\n4:cpu,memory:/jobs/a\n0::/\n")
    write_group(
        tmp_path / "sys/fs/cgroup/memory/jobs/a",
        memory__limit_in_bytes="5000\n",
        memory__usage_in_bytes="4000\n",
        memory__stat="cache 300\ntotal_inactive_file 200\n",
    )
    assert cgroup_limits(tmp_path) == [MemoryLimit(5000, 1200)]


def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path):
    write_membership(tmp_path, "4:memory:/docker/0123\n")
    write_group(
        tmp_path / "sys/fs/cgroup/memory",
        memory__limit_in_bytes="700\n",
        memory__usage_in_bytes="800\n",
        memory__stat="total_inactive_file 0\n",
    )
    assert cgroup_limits(tmp_path) == [MemoryLimit(700, 0)]


def test_no_cgroups_means_no_limit(tmp_path: Path):
    assert cgroup_limits(tmp_path) == []
    assert 0 < available_memory() <= memory_limit().limit
