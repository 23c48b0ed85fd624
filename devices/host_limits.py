"""Find how much of the host this process may use: memory and cores, as its control groups limit them.

A container's quota of processor time leaves all cores visible, and stops every thread of the process once it
is used up. More threads than its cores then use it up by spinning at barriers.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

# The folders and file names of memory limits in control groups of version 2 and of version 1.
MEMORY_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
)
# The folders of CPU groups of version 2 and of version 1, and the latter's controller.
CPU_GROUPS = ((Path("/sys/fs/cgroup"), ""), (Path("/sys/fs/cgroup/cpu"), "cpu"))


def host_memory_bytes() -> int:
    """Return the bytes that this process may use: the host's memory, or less if a control group limits it."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    names = text_of(Path("/proc/self/cgroup"))
    return min([whole, *(limit for root, file in MEMORY_GROUPS for limit in group_limits(names, root, file))])


def group_limits(names: str, root: Path, file: str) -> list[int]:
    """Return the memory limits of a process's control groups and of their parents.

    `names` is the content of its /proc/PID/cgroup, and `file` the limit's name in the folder of each group
    below `root`. In a container, the folder of its own group may be `root` itself, while the name is the
    host's.
    """
    folders = group_folders(names, root, "" if file == "memory.max" else "memory")
    found = [text_of(each / file).strip() for each in folders]
    return [int(limit) for limit in found if limit.isascii() and limit.isdigit()]


def lies_in_memory(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether what is written to this path, which may not be there yet, takes the host's memory."""
    real, place, kind = Path(os.path.realpath(path)), Path("/"), ""
    for line in text_of(mounts).splitlines():
        _, mounted, mounted_kind, *_ = line.split(" ")
        at = Path(mounted.replace(r"\040", " "))
        if real.is_relative_to(at) and at.is_relative_to(place):  # the later one of two lies above
            place, kind = at, mounted_kind
    return kind in ("tmpfs", "ramfs")


def usable_cores() -> int:
    """Return the cores that this process may use: those it may run on, or fewer if a group limits them."""
    return within_quota(visible_cores())


def visible_cores() -> int:
    """Return the cores that this process may run on, whatever the time that it has there."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def within_quota(cores: int) -> int:
    """Return so many cores, or fewer if a control group of this process limits them."""
    names = text_of(Path("/proc/self/cgroup"))
    return min([cores, *(quota for group in CPU_GROUPS for quota in group_quotas(names, *group))])


def group_quotas(names: str, root: Path, controller: str) -> list[int]:
    """Return the quotas of a process's CPU groups and of their parents, in cores, the last one for a part.

    The parameters are those of `group_folders`.
    """
    folders = group_folders(names, root, controller)
    if controller:
        files = "cpu.cfs_quota_us", "cpu.cfs_period_us"
        found = [[text_of(each / file).strip() for file in files] for each in folders]
    else:
        found = [text_of(each / "cpu.max").split() for each in folders]
    # "max" and -1 stand for no quota
    limits = [list(map(int, each)) for each in found if len(each) == 2 and all(map(_is_count, each))]
    return [math.ceil(quota / period) for quota, period in limits if quota and period]


def group_folders(names: str, root: Path, controller: str) -> set[Path]:
    """Return the folders of a process's control groups and of their parents.

    A controller "" stands for version 2. For `names` and `root` see `group_limits`.
    """
    folders = {root}
    for line in filter(None, names.splitlines()):
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(",") and ".." not in name:
            group = root / name.lstrip("/")
            folders |= {group, *(each for each in group.parents if each.is_relative_to(root))}
    return folders


def text_of(path: Path) -> str:
    """Return a file's text, or "" if it is missing or must not be read.

    No limit is known then.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()
