"""Find how many of the host's cores this process may use, as its control groups limit their time.

A container's quota leaves all cores visible, and stops every thread of the process once it is used up. More
threads than its cores then use it up by spinning at barriers.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from devices.host_memory import group_folders, text_of

# The folders of CPU groups of version 2 and of version 1, and the latter's controller
CONTROL_GROUPS = ((Path("/sys/fs/cgroup"), ""), (Path("/sys/fs/cgroup/cpu"), "cpu"))


def usable_cores() -> int:
    """Return the cores that this process may use: those it may run on, or fewer if a group limits them."""
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return within_quota(visible)


def within_quota(cores: int) -> int:
    """Return so many cores, or fewer if a control group of this process limits them."""
    names = text_of(Path("/proc/self/cgroup"))
    return min([cores, *(quota for group in CONTROL_GROUPS for quota in group_quotas(names, *group))])


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


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()
