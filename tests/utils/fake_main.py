"""Write the files of main.py without training: ten evaluations, of which the last scores `--agent.learning_rate`.

The game selects the behaviour:

- `fails` exits with code 4;
- `waits` stops at half of its steps until it is resumed;
- `loses` scores zero;
- `repeats` is evaluated twice more in the period of its last evaluation, and once long after its steps;
- `late` reports all of its steps before its first evaluation is written;
- `overtaken` makes its last steps while it is being interrupted;
- `blind` is never evaluated.

A signal saves and ends the run.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

words = {name.removeprefix("--"): value for name, value in zip(sys.argv[1::2], sys.argv[2::2])}
resume = words.get("resume") if words.get("resume") != "none" else None
signature = resume or f"{words['machine']}_{words['timestamp']}"
root, steps, game = Path(words["root"]), int(words["steps"]), words.get("game", "")
folder, checkpoint = root / "logs" / signature, root / "models" / f"{signature}_checkpoints" / "step_000000000001"
ended: list[int] = []


def note(exit_code):
    content = {
        "config": words["config"],
        "options": {
            "steps": steps,
            "agent": {"learning_rate": float(words.get("agent.learning_rate", 1e-3))},
            "ray": {"address": words.get("ray.address")},
        },
        "file": {},
        "exit_code": exit_code,
    }
    (folder / "run.json").write_text(json.dumps(content))


for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: ended.append(number))
folder.mkdir(parents=True, exist_ok=bool(resume))
checkpoint.mkdir(parents=True, exist_ok=True)
note(None)
print("begins", sys.argv[1:], os.environ.get("OMP_NUM_THREADS"), sorted(os.sched_getaffinity(0)), flush=True)
begun = 10 * json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] // steps if resume else 0


def write(step, **values):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "time": 0, "seconds": 0, "values": values}) + "\n")


def evaluated(step, score):
    values = {"mean": score, "std": 0.0, "median": score}
    write(step, **{f"evaluator/episodic_return_{name}": value for name, value in values.items()})


def played(step):
    write(step, **{"global/agent_steps": step})


rate = float(words.get("agent.learning_rate", 1e-3))
if game == "late":
    played(steps)
for count in range(begun, 0 if game == "blind" else 10):
    while game == "waits" and not resume and count == 5 and not ended:
        time.sleep(0.01)
    if ended and game == "overtaken":
        played(steps)
    if ended or (game == "fails" and count == 3):
        note(128 + ended[0] if ended else 4)
        sys.exit(128 + ended[0] if ended else 4)
    evaluated(steps * (count + 1) // 10, 0.0 if game == "loses" else rate * (count + 1) / 10)
    time.sleep(float(os.environ.get("EVALUATION_SECONDS", "0.02")))
if game == "overtaken" and resume:
    evaluated(steps, 100 * rate)
if game == "repeats":
    for step, times in ((steps + 1, 50), (steps + 2, 60), (5 * steps, 1_000)):
        evaluated(step, times * rate)
if game == "blind":
    played(steps)
note(0)
