"""What memory there is, on made-up machines: every limit that binds is found, and the tightest one is named."""

from __future__ import annotations

from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch

from longgen.errors import CapacityError
from longgen.kv.budget import (
    CONTEXT_BYTES,
    MAX_RESERVE,
    cgroup_limits,
    device_budget,
    host_budget,
    limit_device,
    locked_memory_limit,
)
from tests.plan.machines import GIB, machine, v1, v1_group, v2, v2_group, write

NO_V1_LIMIT = 9223372036854771712


def test_without_cgroups_it_is_what_is_available_less_the_reserve(tmp_path: Path) -> None:
    budget = host_budget(root=machine(tmp_path, available=64 * GIB))
    assert (budget.usable, budget.reserve) == (64 * GIB - MAX_RESERVE, MAX_RESERVE)
    assert budget.source == "64 GiB available of 128 GiB of memory"


def test_the_reserve_is_a_tenth_of_little_memory(tmp_path: Path) -> None:
    assert host_budget(root=machine(tmp_path, available=10 * GIB)).reserve == GIB


def test_a_kernel_without_mem_available_is_read_by_what_is_free(tmp_path: Path) -> None:
    write(machine(tmp_path), "proc/meminfo", f"MemTotal: {16 * 2**20} kB\nMemFree: {4 * 2**20} kB")
    assert host_budget(root=tmp_path).limits[0].free == 4 * GIB


def test_a_v2_limit_below_what_is_available_binds(tmp_path: Path) -> None:
    top = v2(machine(tmp_path), "/job")
    v2_group(top / "job", 20 * GIB, 4 * GIB)
    budget = host_budget(root=tmp_path)
    assert budget.limits[0].free == 16 * GIB
    assert budget.source == "/sys/fs/cgroup/job/memory.max 20 GiB, 4 GiB of it used"


def test_a_limit_above_the_memory_does_not_bind(tmp_path: Path) -> None:
    top = v2(machine(tmp_path, available=64 * GIB), "/job")
    v2_group(top / "job", 500 * GIB, 4 * GIB)
    assert host_budget(root=tmp_path).limits[0].free == 64 * GIB


def test_max_is_no_limit(tmp_path: Path) -> None:
    top = v2(machine(tmp_path), "/job")
    v2_group(top / "job", "max", 4 * GIB)
    assert cgroup_limits(tmp_path) == []


def test_the_tightest_of_nested_v2_groups_binds(tmp_path: Path) -> None:
    top = v2(machine(tmp_path), "/a/b/c")
    v2_group(top / "a", 30 * GIB, 22 * GIB)  # 8 GiB left: siblings of b use much of it
    v2_group(top / "a/b", "max", 2 * GIB)
    v2_group(top / "a/b/c", 16 * GIB, 1 * GIB)
    assert {limit.free for limit in cgroup_limits(tmp_path)} == {8 * GIB, 15 * GIB}
    assert "/sys/fs/cgroup/a/memory.max" in host_budget(root=tmp_path).source


def test_memory_high_binds_like_a_limit(tmp_path: Path) -> None:
    top = v2(machine(tmp_path), "/job")
    v2_group(top / "job", 20 * GIB, 0, high=10 * GIB)
    assert host_budget(root=tmp_path).limits[0].free == 10 * GIB


def test_page_cache_that_can_be_dropped_counts_as_free(tmp_path: Path) -> None:
    top = v2(machine(tmp_path), "/job")
    stat = f"anon 0\ninactive_file {4 * GIB}\nactive_file {2 * GIB}\nfile_dirty {1 * GIB}\nshmem {3 * GIB}"
    v2_group(top / "job", 20 * GIB, 15 * GIB, stat=stat)
    assert cgroup_limits(tmp_path)[0].free == (20 - 15 + 4 + 1 - 1) * GIB


def test_in_a_container_the_mount_shows_only_its_own_part(tmp_path: Path) -> None:
    top = v2(machine(tmp_path), "/", mount_root="/")
    v2_group(top, 12 * GIB, 2 * GIB)
    assert [limit.free for limit in cgroup_limits(tmp_path)] == [10 * GIB]


def test_of_a_path_that_is_seen_in_part_the_part_binds(tmp_path: Path) -> None:
    top = v2(machine(tmp_path), "/a/b/c")
    v2_group(top / "a", 30 * GIB, 2 * GIB)
    v2_group(top / "a/b", 16 * GIB, 1 * GIB)
    assert {limit.free for limit in cgroup_limits(tmp_path)} == {28 * GIB, 15 * GIB}


def test_mounts_and_groups_with_blanks_in_their_names(tmp_path: Path) -> None:
    top = v2(machine(tmp_path), "/my job", at=r"my\040groups")
    (tmp_path / "my groups").mkdir()
    v2_group(tmp_path / "my groups/my job", 16 * GIB, 1 * GIB)
    assert top != tmp_path / "my groups" and [limit.free for limit in cgroup_limits(tmp_path)] == [15 * GIB]


def test_lines_that_are_not_understood_are_passed_over(tmp_path: Path) -> None:
    top = v2(machine(tmp_path), "/job")
    v2_group(top / "job", 16 * GIB, 1 * GIB)
    for name in ("cgroup", "mountinfo"):
        file = tmp_path / "proc/self" / name
        file.write_text(f"nonsense\n1:2\n{file.read_text()}")
    assert [limit.free for limit in cgroup_limits(tmp_path)] == [15 * GIB]


def test_v1_limits_up_the_tree(tmp_path: Path) -> None:
    top = v1(machine(tmp_path), "/slurm/job")
    v1_group(top, NO_V1_LIMIT, 60 * GIB)
    v1_group(top / "slurm", 40 * GIB, 30 * GIB)
    v1_group(top / "slurm/job", 24 * GIB, 3 * GIB, stat=f"total_inactive_file {1 * GIB}\ntotal_active_file {2 * GIB}")
    assert {limit.free for limit in cgroup_limits(tmp_path)} == {10 * GIB, 23 * GIB}


def test_a_v1_container_sees_its_group_as_the_root_of_the_mount(tmp_path: Path) -> None:
    top = v1(machine(tmp_path), "/docker/abc", mount_root="/docker/abc")
    v1_group(top, 8 * GIB, 1 * GIB)
    assert [limit.free for limit in cgroup_limits(tmp_path)] == [7 * GIB]


def test_a_v1_group_that_cannot_be_seen_still_binds(tmp_path: Path) -> None:
    top = v1(machine(tmp_path), "/somewhere/else")
    v1_group(top, NO_V1_LIMIT, 1 * GIB, stat=f"hierarchical_memory_limit {6 * GIB}")
    budget = host_budget(root=tmp_path)
    assert budget.limits[0].free == 5 * GIB
    assert "hierarchical_memory_limit" in budget.source


def test_a_limit_on_the_address_space_binds(tmp_path: Path) -> None:
    write(machine(tmp_path), "proc/self/limits", f"Max address space         {10 * GIB}   unlimited   bytes")
    write(tmp_path, "proc/self/statm", f"{3 * GIB // PAGESIZE} 10 10 1 0 10 0")
    budget = host_budget(root=tmp_path)
    assert budget.limits[0].free == 7 * GIB
    assert budget.source.startswith("RLIMIT_AS")


def test_where_nothing_can_be_read_a_cap_is_asked_for(tmp_path: Path) -> None:
    budget = host_budget(root=tmp_path)
    assert (budget.usable, budget.source) == (0, "it cannot be read here; give --cpu-memory")
    assert host_budget(8 * GIB, tmp_path).usable == 8 * GIB


def test_a_cap_below_every_limit_is_taken_whole(tmp_path: Path) -> None:
    budget = host_budget(8 * GIB, machine(tmp_path, available=64 * GIB))
    assert (budget.usable, budget.reserve, budget.source) == (8 * GIB, 0, "--cpu-memory 8 GiB")


def test_a_cap_overrides_what_is_available_but_no_cgroup(tmp_path: Path) -> None:
    machine(tmp_path, available=4 * GIB, total=8 * GIB)
    assert host_budget(32 * GIB, tmp_path).usable == 32 * GIB
    top = v2(tmp_path, "/job")
    v2_group(top / "job", 20 * GIB, 0)
    budget = host_budget(32 * GIB, tmp_path)
    assert budget.usable == 18 * GIB
    assert "/sys/fs/cgroup/job/memory.max" in budget.source


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    top = v2(machine(tmp_path), "/job")
    v2_group(top / "job", 4 * GIB, 5 * GIB)
    assert host_budget(root=tmp_path).usable == 0


def test_this_machine_has_a_budget() -> None:
    budget = host_budget()
    assert budget.usable > 0
    assert budget.limits


def test_the_limit_on_locked_memory(tmp_path: Path) -> None:
    assert locked_memory_limit(tmp_path) is None
    write(tmp_path, "proc/self/limits", "Max locked memory         8388608              8388608              bytes")
    assert locked_memory_limit(tmp_path) == 8 << 20
    write(tmp_path, "proc/self/limits", "Max locked memory         unlimited            unlimited            bytes")
    assert locked_memory_limit(tmp_path) is None


def test_a_device_without_a_cap_gives_what_is_free_and_what_is_held() -> None:
    budget = limit_device(None, free=130 * GIB, total=140 * GIB, held=1 * GIB)
    assert (budget.usable, budget.total) == (131 * GIB, 140 * GIB)


def test_what_torch_holds_and_a_context_count_as_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 * GIB)
    for free, usable in ((100 * GIB, 110 * GIB + CONTEXT_BYTES), (130 * GIB - 1000, 140 * GIB)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 140 * GIB))
        budget = device_budget(None)
        assert (budget.usable, budget.others) == (usable, 140 * GIB - usable)


def test_a_device_cap_in_bytes_or_as_a_fraction_of_the_card() -> None:
    assert limit_device(24 * GIB, free=130 * GIB, total=140 * GIB, held=0).usable == 24 * GIB
    assert limit_device(0.5, free=130 * GIB, total=140 * GIB, held=0).usable == 70 * GIB


def test_a_cap_above_the_card_or_above_what_others_leave_is_refused() -> None:
    with pytest.raises(CapacityError, match="--gpu-memory 200 GiB is more than the 140 GiB that the card has"):
        limit_device(200 * GIB, free=130 * GIB, total=140 * GIB, held=0)
    with pytest.raises(CapacityError, match="80 GiB is more than the 21 GiB that other processes leave free"):
        limit_device(80 * GIB, free=20 * GIB, total=140 * GIB, held=1 * GIB)
