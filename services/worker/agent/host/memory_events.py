"""How often the kernel killed for want of memory: the counter of this process's control group.

The agent's ranks live in its group or below it, and version 2 counts a group's descendants in. The
root group has no counter: there the machine's own is read. Where none can be read the answer is 0: a
rank that was killed is then said to be killed by somebody.
"""

from pathlib import Path
from typing import Final

_GROUPS: Final = Path("/sys/fs/cgroup")
_MACHINE: Final = Path("/proc/vmstat")
_OWN: Final = Path("/proc/self/cgroup")


def oom_kills(own: Path = _OWN, groups: Path = _GROUPS, machine: Path = _MACHINE) -> int:
    """Processes killed so far in this control group.

    Args:
        own: Names the group, one line a hierarchy.
        groups: Where the hierarchies are mounted.
        machine: Counters of the whole machine, one a line.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if not controllers:
            candidates = (groups / inside / "memory.events", groups / "memory.events")
        elif "memory" in controllers.split(","):
            folder = groups / "memory"
            candidates = (folder / inside / "memory.oom_control", folder / "memory.oom_control")
        else:
            continue
        # In a container the path may be the host's, and the mount the container's own group.
        for file in candidates:
            count = _count(file)
            if count is not None:
                return count
    return _count(machine) or 0


def _count(file: Path) -> int | None:
    try:
        words = dict(line.split() for line in file.read_text().splitlines())
        return int(words["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
