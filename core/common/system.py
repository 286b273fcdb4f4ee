"""Report the software versions of this machine, its free memory and a run's memory, and remove empty cache folders."""

import importlib.metadata
import multiprocessing
import os
import platform
import re
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

PACKAGES = ("torch", "numpy", "gymnasium", "ale-py")  # the packages that decide results
# Version of control groups -> files of limit and usage, and the field of memory.stat with the reclaimable file cache
CGROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


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
    in_groups = _free_bytes_in_cgroups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return min([int(psutil.virtual_memory().available), *in_groups])


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
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, version = (mount / "memory", 1) if controllers else (mount, 2)
        limit, usage, cache = CGROUP_FILES[version]
        group = top / path.lstrip("/")
        for folder in [group, *group.parents][: len(group.parts) - len(top.parts) + 1]:  # the group and its ancestors
            with suppress(OSError, ValueError):  # the file is missing, or holds "max"
                reclaimable = re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.M)
                used = int((folder / usage).read_text()) - (int(reclaimable[1]) if reclaimable else 0)
                free.append(int((folder / limit).read_text()) - used)
    return free
