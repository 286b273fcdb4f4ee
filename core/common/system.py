"""Report versions of software, the cores and the memory that a run may use and has; remove empty cache folders."""

import importlib.metadata
import math
import multiprocessing
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

PACKAGES = ("torch", "numpy", "gymnasium", "ale-py")  # the packages that decide results
MEMBERSHIP, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")  # control groups of this process, and of all
# Version of control groups -> files of limit and usage, and the field of memory.stat with the reclaimable file cache
MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
CPU_FILES = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}  # of quota and period in microseconds


def versions() -> dict[str, str | int]:
    """Return the versions of Python and PACKAGES, the commit of this code, the platform and the number of cores.

    A commit ends with "+changes" if tracked files differ from it.
    """
    installed: dict[str, str | int] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "not installed"
    return {
        **installed,
        "commit": _commit(Path(__file__).resolve().parents[2]),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count() or 0,
    }


def available_bytes() -> int:
    """Return how many bytes this process can still allocate.

    This is the free memory of the machine, or of one of the process's control groups where that is less.
    """
    return min([int(psutil.virtual_memory().available), *_free_bytes_in_cgroups(MEMBERSHIP, MOUNT)])


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity, or the quota of a control group where that is less."""
    return min([len(os.sched_getaffinity(0)), *_core_quotas(MEMBERSHIP, MOUNT)])


def rss_mb() -> float:
    """Return the resident memory of this run's processes in MB (1e6 bytes).

    This is the sum of all private parts plus the largest shared part. Every process maps the same shared arrays and
    libraries, so the largest stands for all. Pages that a process still shares with the fork server count as private.
    It costs one read per process instead of a walk over the page tables.
    """
    parent = multiprocessing.parent_process()
    try:
        main = psutil.Process(parent.pid if parent is not None else None)
        processes = [main, *main.children(recursive=True)]
    except psutil.Error:
        processes = [psutil.Process()]
    private, shared = 0, 0
    for process in processes:
        with suppress(psutil.Error):  # the process ended meanwhile
            memory = process.memory_info()
            private += memory.rss - memory.shared
            shared = max(shared, memory.shared)
    return (private + shared) / 1e6


def remove_empty_compile_caches() -> None:
    """Remove this user's empty folders for compiled kernels, one of which PyTorch makes for every optimiser.

    PyTorch makes a missing folder again when it needs one.
    """
    for folder in Path(tempfile.gettempdir()).glob("torchinductor_*"):
        with suppress(OSError):  # the folder is not empty, or belongs to another user
            if folder.stat().st_uid == os.getuid():
                folder.rmdir()


def _commit(folder: Path) -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _free_bytes_in_cgroups(membership: Path, mount: Path) -> list[int]:
    """Return the free bytes of every memory control group, of either version, that this process belongs to.

    Free means the group's limit, less what is used and cannot be reclaimed.
    """
    free: list[int] = []
    for version, group in _control_groups("memory", membership, mount):
        limit, usage, cache = MEMORY_FILES[version]
        with suppress(OSError, ValueError):  # the file is missing, or holds "max"
            reclaimable = re.search(rf"^{cache} (\d+)$", (group / "memory.stat").read_text(), re.M)
            used = int((group / usage).read_text()) - (int(reclaimable[1]) if reclaimable else 0)
            free.append(int((group / limit).read_text()) - used)
    return free


def _core_quotas(membership: Path, mount: Path) -> list[int]:
    """Return the quota in cores, rounded up, of every control group that has one and that this process belongs to."""
    quotas: list[int] = []
    for version, group in _control_groups("cpu", membership, mount):
        with suppress(OSError, ValueError):  # the file is missing, or holds "max"
            quota, period = (int(text) for name in CPU_FILES[version] for text in (group / name).read_text().split())
            if quota > 0:
                quotas.append(math.ceil(quota / period))
    return quotas


def _control_groups(controller: str, membership: Path, mount: Path) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of each group of this controller that the process belongs to, and of its ancestors."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top, version = (mount / controller, 1) if controllers else (mount, 2)
        group = top / path.lstrip("/")
        for folder in [group, *group.parents][: len(group.parts) - len(top.parts) + 1]:
            yield version, folder
