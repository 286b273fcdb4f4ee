"""Count the files that a reader enters on the trips of a run: a transition, an option, a checkpoint.

    python -m benchmarks.trips [--files] [CHECKOUT ...]

Two inline runs of dqn-cartpole, the second of which resumes the first, are traced in each checkout. A function counts
at its first call on a trip, so loops count once. Printed are, for each trip, the distinct files of core/ and utils/,
and the returns to a file that was left before. The trip of a transition begins after 300 slices of the learner and
leaves out reports and checkpoints: it is what happens between an observation and published weights.
"""

import argparse
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

WARM_UP = 300  # slices of the learner
# The functions that begin each trip, as file and name; some names are those of earlier versions.
TRIPS: dict[str, set[tuple[str, str]]] = {
    "transition": {("actor.py", "_play"), ("learner.py", "_learn"), ("learner.py", "learn")},
    "arguments through read_options": {("command_line.py", "read_options")},
    "options through create_context": {("launch.py", "create_context"), ("run.py", "prepare")},
    "context through learner": {("learner.py", "learner")},
    "checkpoint saved": {("learner_checkpoint.py", "save"), ("learner.py", "save"), ("learner_state.py", "save")},
    "checkpoint restored": {
        ("launch.py", "_continue"),
        ("run.py", "_continue"),
        ("learner_checkpoint.py", "restore"),
        ("learner.py", "restore"),
        ("learner_state.py", "restore"),
    },
}
REPORTS = {"report", "statistics", "save", "save_alone", "close"}


class Trace:
    """The functions that were entered on each trip, in the order of their first calls."""

    def __init__(self, checkout: Path):
        self._folders = tuple(f"{checkout / name}/" for name in ("core", "utils"))
        self._root = len(str(checkout)) + 1
        self._entered: dict[str, dict[object, str]] = {trip: {} for trip in TRIPS}
        self.slices = 0  # of the learner, in this run

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")  # no body of a class
        if event != "call" or not is_function or not code.co_filename.startswith(self._folders):
            return
        callers, caller = [], frame
        while caller is not None:
            callers.append((os.path.basename(caller.f_code.co_filename), caller.f_code.co_name))
            caller = caller.f_back
        self.slices += callers[0] in (("learner.py", "_learn"), ("learner.py", "learn"))
        for trip, begins in TRIPS.items():
            steady = self.slices > WARM_UP and REPORTS.isdisjoint(name for _, name in callers)
            if not begins.isdisjoint(callers) and (trip != "transition" or steady):
                self._entered[trip].setdefault(code, code.co_filename[self._root :])

    def print(self, files: bool) -> None:
        for trip, functions in self._entered.items():
            left, returns, current = set(), 0, ""
            for file in functions.values():
                if file != current:
                    returns += file in left
                    left.add(current)
                    current = file
            entered = sorted(set(functions.values()))
            print(f"{trip}: {len(entered)} files, {returns} returns, {len(functions)} functions", flush=True)
            if files:
                print("    " + "\n    ".join(entered))


def trace(checkout: Path, files: bool) -> None:
    """Trace the runs of a checkout, whose modules this process imports."""
    os.chdir(checkout)
    sys.path[0] = str(checkout)
    import main

    recorder, folder = Trace(checkout), tempfile.mkdtemp()
    words = ("--config", "dqn-cartpole", "--engine", "inline", "--root", folder)
    sys.setprofile(recorder)
    try:
        main.main([*words, "--machine", "trip", "--timestamp", "one", "--steps", "3000"])
        recorder.slices = 0
        main.main([*words, "--resume", "trip_one", "--steps", "3200"])
    finally:
        sys.setprofile(None)
        shutil.rmtree(folder)
    recorder.print(files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", default=[os.getcwd()], help="folders; by default this one")
    parser.add_argument("--files", action="store_true", help="print the names of the files")
    parser.add_argument("--trace", action="store_true", help="trace one checkout in this process")
    options = parser.parse_args()
    for checkout in options.checkouts:
        if options.trace:
            trace(Path(checkout), options.files)
        else:
            print(checkout, flush=True)
            words = [sys.executable, __file__, "--trace", os.path.abspath(checkout), *(["--files"] * options.files)]
            subprocess.run(words, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
