"""Resident memory and open files of processes, by the kernel's own count."""

from __future__ import annotations

from pathlib import Path

_PROCESSES = Path("/proc")


def resident_bytes(pid: int | str = "self") -> int:
    """What a process holds now. Raises OSError where there is none."""
    for line in (_PROCESSES / str(pid) / "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0  # it has ended and waits to be reaped


def open_files(pid: int | str = "self") -> int:
    """How many descriptors a process has open. Raises OSError where there is none."""
    return sum(1 for _ in (_PROCESSES / str(pid) / "fd").iterdir())


def child_processes(pid: int) -> list[int]:
    """Those that a process has started and that run. Raises OSError where it is gone."""
    children: list[int] = []
    for thread in (_PROCESSES / str(pid) / "task").iterdir():
        children += map(int, (thread / "children").read_text().split())
    return sorted(children)


def module_of(pid: int) -> str:
    """The module of `python -m MODULE`, else the program's name. Raises OSError where the process is gone."""
    arguments = (_PROCESSES / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else Path(arguments[0]).name


def children_by_module(pid: int) -> dict[str, int]:
    """Resident bytes of a process's children, those of one module together, their own children not counted."""
    found: dict[str, int] = {}
    for child in child_processes(pid):
        name = module_of(child)
        found[name] = found.get(name, 0) + resident_bytes(child)
    return found
