"""What a run ran on, and what it occupies there."""

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

PACKAGES = ("torch", "numpy", "gymnasium", "ale-py")


def versions() -> dict[str, str | int]:
    """Python, the packages that decide results, the commit of this code ("+changes" when edited since), platform and cores."""
    found: dict[str, str | int] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "commit": _commit(Path(__file__).resolve().parents[2]), "platform": platform.platform(),
            "cpu_count": os.cpu_count() or 0}


def resident_memory_mb() -> float:
    """MB (1e6 bytes) that this run's processes hold: the private pages of all, and the largest shared part once.

    Every process maps the same shared arrays and libraries, so the largest part stands for all of them: one cheap read a process instead of
    a walk over the page tables.
    """
    private, shared = 0, 0
    for process in _processes():
        try:
            memory = process.memory_info()
        except psutil.Error:  # ended in between
            continue
        private += memory.rss - memory.shared
        shared = max(shared, memory.shared)
    return (private + shared) / 1e6


def remove_empty_compile_caches() -> None:
    """Remove the folders for compiled kernels into which nothing was put. PyTorch makes one when an optimiser is made, and makes it again
    where it is wanted and gone."""
    for folder in Path(tempfile.gettempdir()).glob("torchinductor_*"):
        with suppress(OSError):  # another user's, or not empty
            if folder.stat().st_uid == os.getuid():
                folder.rmdir()


def end_children() -> None:
    """Kill all that this process has started and that still runs, but multiprocessing's resource tracker, which ends by itself."""
    with suppress(psutil.Error, OSError):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()


def _processes() -> list[psutil.Process]:
    """The main process of this run and all below it."""
    parent = multiprocessing.parent_process()
    try:
        main = psutil.Process(parent.pid if parent is not None else None)
        return [main, *main.children(recursive=True)]
    except psutil.Error:
        return [psutil.Process()]


def _commit(folder: Path) -> str:
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return f"{commit}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


GROUP_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # of a control group: limit, use, and of that
               2: ("memory.max", "memory.current", "inactive_file")}                          # what a file cache would give back


def available_bytes() -> int:
    """Bytes this process can still allocate: free memory of the machine, or of a control group it is in where that is less."""
    return min([int(psutil.virtual_memory().available), *_free_in_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _free_in_groups(own: Path, mount: Path) -> list[int]:
    """Of every memory control group (either version) that this process is in: its limit less what is used and cannot be given back."""
    free: list[int] = []
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, version = (mount / "memory", 1) if controllers else (mount, 2)
        limit, usage, cache = GROUP_FILES[version]
        group = top / path.lstrip("/")
        for folder in [group, *group.parents][:len(group.parts) - len(top.parts) + 1]:  # up to the top
            with suppress(OSError, ValueError):  # no such file here, or "max"
                reclaimable = re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.M)
                used = int((folder / usage).read_text()) - (int(reclaimable[1]) if reclaimable else 0)
                free.append(int((folder / limit).read_text()) - used)
    return free
