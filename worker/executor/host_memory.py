"""How much memory the host has left, in bytes."""

from __future__ import annotations

from pathlib import Path


def free_host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process can still take: the kernel's estimate, or less where a control group (v2) limits it."""
    free = _meminfo(meminfo, "MemAvailable:")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, max(0, int(limit) - used)) if limit.isdecimal() else free


def total_host_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory of the machine."""
    return _meminfo(meminfo, "MemTotal:")


def _meminfo(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0
