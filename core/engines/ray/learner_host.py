"""The host of a learner on another node than home: the process that owns what main owns for the learners at home.

It allocates the learner's memory and this node's parameters, counters, run state and log rings. The learner, and those
of its actors that Ray places on this node, open them as they would open main's. The host is also the trajectory server
of this learner's actors elsewhere, and keeps counters and run state equal to home's (core/engines/ray/mirror.py).
"""

import asyncio
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ray

from core.common.console import log_to_stderr
from core.common.files import TEMPORARY
from core.common.processes import set_process_name
from core.distributed.learner_group import Rendezvous
from core.engines.ray.code_version import check_code
from core.engines.ray.file_transfer import SendHome, fetch_file
from core.engines.ray.mirror import Mirror, RunSnapshot
from core.engines.ray.remote_context import RemoteRunInfo
from core.engines.ray.sweeper import Sweeper
from core.engines.ray.trajectory_server import TrajectoryServer
from core.engines.ray.worker import Host
from core.engines.run_end import TRAINING_FAILED
from core.memory import Memory
from core.runtime.context import Context
from core.runtime.log_buffers import LogRings
from core.runtime.run_state import ParameterStore, RateLimiter, RunCounters, RunState

PERIOD = 0.05  # seconds between two exchanges with home


class HostPlan(NamedTuple):
    """The parts of main's context that a host needs."""

    run_info: RemoteRunInfo
    make_memory: Callable[[], Memory]
    num_parameters: int
    run: RunSnapshot
    rendezvous: Rendezvous
    resume_from: Path | None
    initial_weights: Path | None
    token: Path  # a file that exists on nodes which see the run's folder


class LearnerHost(TrajectoryServer):
    """A Ray actor. `prepare` must be called first, then `mirror`, which ends with the process."""

    def __init__(self, learner: int, plan: HostPlan, home: Any):
        """Do nothing yet, because Ray reports an error of a method better.

        Args:
            learner: the learner.
            plan: what main has decided.
            home: handle of the trajectory server at home.
        """
        self._learner, self._plan, self._home = learner, plan, home
        self._exchanging = asyncio.Lock()
        self._folder: Path | None = None  # this node's own, if it does not see the run's

    def __repr__(self) -> str:
        return f"host of learner {self._learner}"

    async def prepare(self) -> Host:
        """Allocate everything, and return how processes of this node reach it.

        Raises:
            CodeMismatchError: this node has another version of the project.
            MemoryError: this node has too little memory.
        """
        set_process_name(f"host {self._learner}")
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        check_code(self._plan.run_info.code, address)
        # In a thread, because files may have to be fetched, and Ray's calls would block this one's event loop.
        context = await asyncio.to_thread(self._make_context)
        super().__init__(context)
        self._mirror = Mirror(context, self._learner)
        self._mirror.restore(self._plan.run)
        return Host(ray.get_runtime_context().get_node_id(), os.getpid(), [ray.put(context)], None)

    def _make_context(self) -> Context:
        plan, info = self._plan, self._plan.run_info
        counters = RunCounters(info.options.num_actors, info.options.num_learners)
        context = Context(
            info.options,
            info.spec,
            info.roles,
            {self._learner: plan.make_memory()},
            ParameterStore(plan.num_parameters),
            counters,
            RateLimiter(info.options.rate_limiter, counters),
            RunState(len(info.roles)),
            LogRings(len(info.roles)),
            plan.resume_from,
            plan.initial_weights,
            rendezvous=plan.rendezvous,
        )
        return context if plan.token.exists() else self._with_own_folder(context)

    def _with_own_folder(self, context: Context) -> Context:
        """Return the context of a node that does not see the run's folder: files are fetched from home and sent there.

        The folder is removed by `close`, and otherwise by its sweeper when this process ends.
        """
        root = self._folder = Path(tempfile.mkdtemp(prefix="learner_host_"))
        self._sweeper = Sweeper(str(root))
        resume_from = context.resume_from
        if resume_from is not None:
            resume_from = root / resume_from.name
            resume_from.mkdir()
            for name in ("manifest.json", f"learner_{self._learner}.pt", f"memory_{self._learner}.pt"):
                fetch_file(self._home, name, resume_from / name)
        options = dataclasses.replace(context.options, root=str(root))
        return dataclasses.replace(context, options=options, resume_from=resume_from, send_home=SendHome(self._home))

    async def mirror(self) -> None:
        """Exchange with home until this process ends. End it if home is silent for `ray.learner_timeout`."""
        limit, last_answer = self._context.options.ray.learner_timeout, time.monotonic()
        while True:
            try:
                await asyncio.wait_for(self.exchange_with_home(), limit)
                last_answer = time.monotonic()
            except (ray.exceptions.RayError, TimeoutError):  # Ray restarts the server at home
                if limit is not None and time.monotonic() - last_answer >= limit:
                    log_to_stderr(f"learner {self._learner}'s node ends: home was silent for {limit:g} s")
                    os._exit(TRAINING_FAILED)
            await asyncio.sleep(PERIOD)

    async def exchange_with_home(self) -> None:
        """Send a report, and take over the answer."""
        async with self._exchanging:
            self._mirror.follow(await self._home.exchange.remote(self._mirror.report()))

    def close(self) -> None:
        """Remove this node's own folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._sweeper.close()


def place_token(folder: Path) -> Path:
    """Make a file by which other nodes see that they share this folder. The caller removes it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=TEMPORARY, dir=folder)
    os.close(descriptor)
    return Path(name)
