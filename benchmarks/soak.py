"""Run a training whose processes are killed: at fixed intervals a random one gets SIGKILL.

    python -m benchmarks.soak --minutes 30                    kill actors, evaluator and logger, which are replaced
    python -m benchmarks.soak --minutes 30 --victim learner   kill the learner; this program resumes the run

Agent steps, updates, resident memory and descriptors of the main process are measured once a second. After each kill
two times are measured: until the victim is replaced, and until agent steps and updates over ten seconds are back at
nine tenths of the rate before. Results are docs/results/soak-<victim>.csv (a line per second), .json (a summary and
every violation) and .png. The exit code is 1 if there is a violation. Needs matplotlib.
"""

import argparse
import csv
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.training import RESULTS, ROOT
from core.checkpoint import run_checkpoint

VICTIMS = {"others": ("actor", "evaluator", "logger"), "learner": ("learner",)}
RATE_SECONDS = 10.0  # Interval over which a rate is measured.
SETTLE = 30.0  # Seconds from the first agent step to the first kill.
RECOVERED = 0.9  # Share of the rate before the kill that counts as recovered.
MEMORY_GROWTH = 1.1  # Allowed ratio of the medians of the last and the first quarter.
COLUMNS = ("seconds", "agent_steps", "updates", "memory_mb", "descriptors", "event")
NO_PROGRESS = np.zeros(2)  # Agent steps and updates.


class Run:
    """A run of `python main.py`, its files, and its processes by name ("actor 0"). It can be resumed after its end."""

    def __init__(self, options: argparse.Namespace, root: Path = ROOT):
        self.timestamp = f"soak-{options.victim}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.signature, self._options, self._root = f"soak_{self.timestamp}", options, root
        self.seen: dict[int, psutil.Process] = {}
        self._metrics_end, self.progress = 0, NO_PROGRESS
        self.start("--machine", "soak", "--timestamp", self.timestamp)

    def start(self, *identity: str) -> None:
        """Start main.py with these words, which name the run."""
        options = self._options
        words = (
            f"--config {options.config} --seed {options.seed} --num_actors {options.actors} --steps {10**9} "
            "--logger.period 1 --evaluator.period 5 --evaluator.episodes 5 "
            f"--supervisor.max_restarts {10**6} --learner.checkpoint_period 5"
        )
        command = [sys.executable, "main.py", "--root", str(self._root), *words.split(), *identity]
        self.process = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)

    def children(self) -> dict[str, psutil.Process]:
        """Return the processes of the run by name."""
        found = {}
        for child in self.process.children(recursive=True) if self.process.is_running() else []:
            try:
                name = Path(f"/proc/{child.pid}/comm").read_text().strip()
            except OSError:
                continue
            self.seen[child.pid] = child
            found[name] = child
        return found

    def new_progress(self) -> list[tuple[float, np.ndarray]]:
        """Return (time, agent steps and updates) of each log period since the last call."""
        path, found = self._root / "logs" / self.signature / "metrics.jsonl", []
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._metrics_end)
                for line in file:
                    if line.endswith(b"\n"):
                        self._metrics_end += len(line)
                        row = json.loads(line)
                        if "global/agent_steps" in row["values"]:
                            found.append(
                                (
                                    row["time"],
                                    np.array([row["values"][f"global/{name}"] for name in ("agent_steps", "updates")]),
                                )
                            )
        return found

    def memory_mb(self) -> float:
        """Return the private memory of all processes plus the largest shared part, as core.common.system counts it."""
        private, shared = 0, 0
        for process in (self.process, *self.children().values()):
            try:
                memory = process.memory_info()
            except psutil.Error:
                continue
            private, shared = private + memory.rss - memory.shared, max(shared, memory.shared)
        return (private + shared) / 1e6

    def saved_progress(self) -> np.ndarray:
        """Return agent steps and updates of the newest checkpoint."""
        state, _ = run_checkpoint.load(self._root / "models" / f"{self.signature}_checkpoints")
        return np.array([sum(state["clock"]["agent_steps"]), state["clock"]["updates"][0]], float)


class Soak:
    """One soak: it kills processes, records measurements, and reports violations."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.random, self.run = options, random.Random(options.seed), Run(options)
        self.rows: list[dict[str, Any]] = []
        self.kills: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.points: list[tuple[float, np.ndarray]] = []  # Time and progress, including steps lost by earlier resumes.
        self._lost = NO_PROGRESS  # Progress after the last checkpoint of each earlier start.

    def watch(self, seconds: float, event: str = "") -> None:
        """Record a row per second for `seconds`; the first one names the event."""
        end = time.monotonic() + seconds
        while True:
            self._read_progress()
            descriptors = self.run.process.num_fds() if self.run.process.is_running() else 0
            steps, updates = self.run.progress.astype(int).tolist()
            self.rows.append(
                {
                    "seconds": round(time.time() - self.began, 1),
                    "agent_steps": steps,
                    "updates": updates,
                    "memory_mb": round(self.run.memory_mb(), 1),
                    "descriptors": descriptors,
                    "event": event,
                }
            )
            event = ""
            if time.monotonic() >= end:
                return
            time.sleep(max(min(1.0, end - time.monotonic()), 0.01))

    def _read_progress(self) -> None:
        for moment, progress in self.run.new_progress():
            if (progress < self.run.progress).any():
                self.faults.append(f"agent steps and updates fell from {self.run.progress} to {progress}")
            self.run.progress = progress
            self.points.append((moment, progress + self._lost))

    def play(self) -> None:
        """Kill processes until the time is over, then interrupt the run and look for leftovers."""
        self.began = time.time()
        while self.run.progress[0] == 0:
            self.watch(1.0)
        self.watch(SETTLE, "started")
        while (moment := time.time()) - self.began < 60 * self.options.minutes:
            name = self._kill()
            self.watch(moment + self.options.every - time.time(), f"killed {name}")
        self.run.process.send_signal(signal.SIGINT)
        exit_code = self.run.process.wait(60)
        if exit_code != 130:
            self.faults.append(f"the interrupted run left {exit_code} instead of 130")
        _, alive = psutil.wait_procs(self.run.seen.values(), timeout=3)
        self.faults += [f"{process} is left over" for process in alive]
        self._read_progress()

    def _kill(self) -> str:
        names = [name for name in self.run.children() if name.split()[0] in VICTIMS[self.options.victim]]
        name = self.random.choice(sorted(names))
        victim, moment = self.run.children()[name], time.time()
        victim.kill()
        resumed = self._resume() if name.startswith("learner") else {}
        while (now := self.run.children().get(name)) is None or now.pid == victim.pid:
            time.sleep(0.05)
            if time.time() - moment > 60:
                raise TimeoutError(f"{name} was not replaced within a minute")
        self.kills.append(
            {"victim": name, "time": moment, "replaced_seconds": round(time.time() - moment, 2), **resumed}
        )
        return name

    def _resume(self) -> dict[str, Any]:
        """Resume from the newest checkpoint, like a caller that sees exit code 4."""
        killed = time.time()
        exit_code = self.run.process.wait(60)
        ended, saved = time.time() - killed, self.run.saved_progress()
        self._read_progress()
        if exit_code != 4:
            self.faults.append(f"a run whose learner was killed left {exit_code} instead of 4")
        lost = self.run.progress - saved
        self._lost = self._lost + lost
        self.run.progress = saved
        self.run.start("--resume", self.run.signature)
        return {"ended_seconds": round(ended, 2), "lost_steps": int(lost[0])}

    def speeds(self, begin: float, end: float) -> np.ndarray:
        """Return agent steps and updates per second, from the counts interpolated at both times."""
        times, counts = [moment for moment, _ in self.points], np.array([count for _, count in self.points])
        return np.array([np.diff(np.interp([begin, end], times, each))[0] for each in counts.T]) / (end - begin)

    def report(self) -> dict[str, Any]:
        """Return the summary, every kill and every violation."""
        ends = [kill["time"] for kill in self.kills[1:]] + [self.points[-1][0]]
        for kill, end in zip(self.kills, ends, strict=True):
            previous = self.speeds(kill["time"] - RATE_SECONDS, kill["time"])
            starts = np.arange(kill["time"], end - RATE_SECONDS, 0.5)
            shares = [float(np.min(self.speeds(start, start + RATE_SECONDS) / previous)) for start in starts]
            recovered = next((start for start, share in zip(starts, shares, strict=True) if share >= RECOVERED), None)
            kill |= {
                "steps_per_second_before": round(previous[0], 1),
                "updates_per_second_before": round(previous[1], 1),
                "best_after": round(max(shares, default=0.0), 2),
                "recovered_seconds": None if recovered is None else round(recovered - kill["time"], 1),
            }
            if recovered is None and end - kill["time"] >= self.options.every:
                self.faults.append(
                    f"{kill['victim']}, killed at {kill['time'] - self.began:.0f} s: the speed came back to "
                    f"{kill['best_after']:.2f} before the next kill"
                )
        memory = [row["memory_mb"] for row in self.rows if row["event"] == "" and row["agent_steps"]]
        quarter = len(memory) // 4
        first, final = float(np.median(memory[:quarter])), float(np.median(memory[-quarter:]))
        if final > MEMORY_GROWTH * first:
            self.faults.append(f"memory grew from {first:.0f} to {final:.0f} MB")
        return {
            "command": " ".join(sys.orig_argv[1:]),
            "run": self.run.signature,
            "minutes": round((time.time() - self.began) / 60, 1),
            "agent_steps": int(self.run.progress[0]),
            "updates": int(self.run.progress[1]),
            "kills": len(self.kills),
            "memory_mb_first_quarter": first,
            "memory_mb_last_quarter": final,
            "descriptors": sorted({row["descriptors"] for row in self.rows}),
            "faults": self.faults,
            "each": self.kills,
        }


def draw(path: Path, soak: Soak) -> None:
    """Draw agent steps per second and memory over time, with a line for each kill."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (speed, memory) = pyplot.subplots(2, 1, figsize=(10, 5), sharex=True, layout="constrained")
    begin, end = soak.points[0][0], soak.points[-1][0]
    moments = np.arange(begin, end - RATE_SECONDS / 2, 1.0)
    minutes = (moments + RATE_SECONDS / 4 - soak.began) / 60
    speed.plot(minutes, [soak.speeds(moment, moment + RATE_SECONDS / 2)[0] for moment in moments], linewidth=1)
    memory.plot([row["seconds"] / 60 for row in soak.rows], [row["memory_mb"] for row in soak.rows], linewidth=1)
    for kill in soak.kills:
        for axes in (speed, memory):
            axes.axvline((kill["time"] - soak.began) / 60, color="tab:red", linewidth=0.5, alpha=0.6)
    speed.set(
        ylabel="agent steps a second",
        ylim=(0, None),
        title=f"{soak.options.config}, a kill every {soak.options.every:.0f} s (red)",
    )
    speed.yaxis.set_major_formatter(ticker.EngFormatter())
    memory.set(xlabel="minutes", ylabel="resident memory, MB", ylim=(0, None))
    figure.savefig(path, dpi=110)


def main() -> int:
    """Run the soak, write the results and return 1 if there was a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=30, help="seconds between kills")
    parser.add_argument("--victim", choices=VICTIMS, default="others")
    parser.add_argument("--config", default="dqn-minatar-breakout")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    soak = Soak(options)
    try:
        soak.play()
    finally:
        if soak.run.process.is_running():
            soak.run.process.kill()
        with (options.output / f"soak-{options.victim}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(soak.rows)
    report = soak.report()
    (options.output / f"soak-{options.victim}.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(options.output / f"soak-{options.victim}.png", soak)
    print(json.dumps({name: value for name, value in report.items() if name != "each"}, indent=1))
    return bool(report["faults"])


if __name__ == "__main__":
    sys.exit(main())
