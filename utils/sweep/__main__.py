"""Train many runs with one command, rows x option values x seeds, and write one table.

    python -m utils.sweep --configs dqn-cartpole rainbow-cartpole --seeds 1 2 3
    python -m utils.sweep --name lr1e-4 --configs dqn-cartpole --seeds 1 2 3 --jobs 2 \\
        -- --steps 100000 --agent.learning_rate 1e-4
    python -m utils.sweep --name lr --configs dqn-cartpole --seeds 1 2 3 \\
        --vary agent.learning_rate=1e-3,3e-4 agent.n_step=1,3

Options after -- apply to each run. Each combination of the values of --vary is one line of the table, like a row of
CONFIGS. The runs are logs/<name>_<row>-seed<N>, or with --vary logs/<name>_<row>-learning_rate-1e-3-n_step-1-seed<N>.
Their output and the tables are in logs/<name>/. Ctrl-C makes every run save and end. The same command continues:
complete runs are not repeated, interrupted ones are resumed, failed ones are tried again. With --jobs each run has a
share of the cores.
"""

import argparse
import csv
import itertools
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from core.common.terminal import relay_output
from utils.config.command_line import refusing, split
from utils.config.rows import split_values
from utils.errors import ConfigurationError
from utils.options import PROJECT, Options
from utils.plot.curves import OVERSHOOT, curve_of, late_score, markdown, until
from utils.sweep.subprocess_run import ChildRun, Runner, claimed, options_of, parsed, seeded

NOT_IN_FILE_NAMES = re.compile(r"[^\w.+-]+")


class Result(NamedTuple):
    """The outcome of one run. Scores are means of evaluation episodes; nan if there was no evaluation."""

    row: str  # Row of CONFIGS, followed by the varied options.
    seed: int
    complete: bool  # The run has made all its steps.
    exit_code: int | None  # Exit code of the last start. If None, the run was killed or never started.
    steps: int  # Agent steps.
    minutes: float  # Wall time.
    final: float  # Score of the last evaluation.
    best: float  # Score of the best evaluation.
    late: float  # Mean of the evaluations after 80 % of the steps.


class Summary(NamedTuple):
    """The outcome of one row: means over the seeds that were evaluated."""

    row: str
    seeds: str  # Number of evaluated seeds, and of all.
    late: float
    late_of_each: str
    final: float
    best: float
    steps: int
    minutes: float  # Wall time of a run.
    incomplete: str  # Seeds that did not complete, and how they ended.


@refusing()
def main(arguments: Sequence[str]) -> int:
    """Run the sweep and return its exit code.

    Returns:
        0 if all runs are complete, 1 if some failed, 130 or 143 after SIGINT or SIGTERM with the runs saved. Wrong
        options exit with 2.
    """
    options, words = parsed(parser(), arguments)
    folder = Path(options.root) / "logs" / options.name
    runs = planned(options, variants(options.vary, words), folder)
    runner = Runner(runs, options.jobs)
    with claimed(folder), relay_output():
        exit_code = runner.run()
    print(tabulate(runs, folder / "table"), end="")
    return exit_code or int(not all(run.complete for run in runs))


def variants(varied: Iterable[str], words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return (suffix of the row's name, words of the command line) for every combination of name=value,value,...

    Raises:
        ConfigurationError: a text has another form, or a name is given twice.
    """
    options, _ = split(words)
    axes, errors = dict[str, list[str]](), list[str]()
    for text in varied:
        name, _, values = text.partition("=")
        name, choices = name.replace("-", "_"), split_values(values)
        if not all(choices) or len(set(choices)) < max(len(choices), 2):
            errors.append(f"--vary {text!r}: write name=value,value with two values or more, each once")
        if name in axes or name in options:
            errors.append(f"--vary {text!r}: {name} is given twice")
        axes[name] = choices
    if errors:
        raise ConfigurationError(errors)
    expanded = []
    for combination in itertools.product(*axes.values()):
        suffix, added = "", list[str]()
        for name, value in zip(axes, combination):
            suffix += f"-{name.rpartition('.')[2]}-{NOT_IN_FILE_NAMES.sub('-', value)}"
            added += [f"--{name}", *filter(None, split_values(value, " "))]
        expanded.append((suffix, [*words, *added]))
    return expanded


def planned(options: argparse.Namespace, variants: list[tuple[str, list[str]]], folder: Path) -> list[ChildRun]:
    """Return the runs of every row, variant and seed, one per signature.

    Raises:
        ConfigurationError: a seed is out of bounds, or runs of one signature would have different options.
    """
    runs, errors, templates = dict[str, ChildRun](), list[str](), dict[str, Options]()
    for config in options.configs:
        for suffix, words in variants:
            template = options_of(config, words, options.name, options.root)
            row = f"{template.config}{suffix}"
            errors += [
                f"{earlier} and {row} would be the same runs: --vary takes each value once"
                for earlier, other in templates.items()
                if other == template and earlier != row
            ]
            templates[row] = template
            for each in seeded(template, row, options.seeds):
                run = ChildRun(each, words, folder / f"{each.timestamp}.txt", row)
                if runs.setdefault(each.signature, run).options != each:
                    errors.append(
                        f"two different runs would both be named {each.signature}: make them in sweeps of two names"
                    )
    if errors:
        raise ConfigurationError(list(dict.fromkeys(errors)))
    return list(runs.values())


def tabulate(runs: Sequence[ChildRun], path: Path) -> str:
    """Write path.csv and path.md, a line per row, and path-runs.csv, a line per run; return the Markdown."""
    results = [result(run) for run in runs]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = summaries(results)
    write_csv(path.with_name(f"{path.name}-runs.csv"), results)
    write_csv(path.with_name(f"{path.name}.csv"), lines)
    columns = [name.replace("_", " ") for name in Summary._fields]
    text = markdown(columns, ([f"{x:.2f}" if isinstance(x, float) else str(x) for x in line] for line in lines))
    path.with_name(f"{path.name}.md").write_text(text)
    return text


def result(run: ChildRun) -> Result:
    """Return the outcome of a run from its files."""
    lines, planned_steps = run.lines, run.options.steps
    curve = until(curve_of(lines), planned_steps)
    final, best = (float(curve.values[-1]), float(curve.values.max())) if len(curve.values) else (math.nan, math.nan)
    steps, seconds = (int(lines[-1]["step"]), float(lines[-1]["seconds"])) if lines else (0, 0.0)
    if planned_steps and len(curve.steps) and steps > OVERSHOOT * planned_steps:  # An earlier sweep trained it further.
        steps, seconds = int(curve.steps[-1]), float(curve.seconds[-1])
    late = late_score(curve, planned_steps)
    return Result(run.row, run.options.seed, run.complete, run.exit_code, steps, seconds / 60, final, best, late)


def summaries(results: Sequence[Result]) -> list[Summary]:
    """Return one summary per row, in the order of the results."""
    found = []
    for row in dict.fromkeys(result.row for result in results):
        runs = [result for result in results if result.row == row]
        evaluated = [result for result in runs if not math.isnan(result.late)]
        late, final, best, minutes = (
            float(np.mean([getattr(result, name) for result in evaluated])) if evaluated else math.nan
            for name in ("late", "final", "best", "minutes")
        )
        seeds, late_of_each = f"{len(evaluated)} of {len(runs)}", " ".join(f"{result.late:.2f}" for result in evaluated)
        steps = max(result.steps for result in runs)
        incomplete = ", ".join(
            f"seed {each.seed}: {'killed or not begun' if each.exit_code is None else f'exit code {each.exit_code}'}"
            for each in runs
            if not each.complete
        )
        found.append(Summary(row, seeds, late, late_of_each, final, best, steps, minutes, incomplete))
    return found


def write_csv(path: Path, lines: Sequence[Result] | Sequence[Summary]) -> None:
    """Write a column per field and a line per result or summary."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([lines[0]._fields, *lines])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m utils.sweep", description=__doc__, formatter_class=shape)
    add = parser.add_argument
    add("--configs", nargs="+", required=True, help="rows of CONFIGS")
    add("--seeds", nargs="+", type=int, default=[1], help="one run per seed")
    add("--vary", nargs="+", default=[], metavar="NAME=VALUE,VALUE", help="options of which every combination is run")
    add("--jobs", type=int, default=1, help="number of runs at a time")
    add("--name", default="sweep", help="name of the sweep; take another one for other options")
    add("--root", type=os.path.expanduser, default=PROJECT, help="folder of models/ and logs/")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
