"""Search option values of a row that score best. optuna proposes values and ends bad trials early.

    python -m utils.tune --config dqn-cartpole --trials 20 -- --steps 50000
    python -m utils.tune --config impala-minatar-breakout --trials 30 \\
        --ranges agent.learning_rate agent.entropy_cost=1e-3..1e-1:log -- --steps 300000

Options after -- apply to each run. Ranges are those declared in utils/tune/ranges.py, or are written as low..high,
low..high:log or a,b,c. A trial is the run logs/<name>_trial<N>. Its score is the mean of its evaluations after 80 % of
the steps. The study is kept in logs/<name>/study.log. Ctrl-C saves the current run, and the same command continues it.
Needs optuna: pip install -e ".[tune]".
"""

import argparse
import csv
import dataclasses
import json
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.common.exit_codes import BAD_CHECKPOINT
from core.common.terminal import relay_output
from utils.config.command_line import refusing, split
from utils.config.rows import CHOICES, OPEN_LINES, changed, class_defaults, flatten, split_values
from utils.errors import ConfigurationError, import_extra
from utils.options import PROJECT, Options
from utils.plot import figures
from utils.plot.curves import PERIOD, Curve, counts, curve_of, late_score, until
from utils.sweep.subprocess_run import (
    POLL,
    ChildRun,
    SignalForwarder,
    claimed,
    options_of,
    parsed,
    wait_until_idle,
    words_of,
)
from utils.tune.ranges import Range, ranges

WIDTH = 110  # Columns of a printed row.
LOOK_PERIOD = 5.0  # Seconds between two looks at the scores of a running trial.
LOWEST = {"trials": 1, "startup": 0, "warmup": 0, "evaluations": 1}  # Smallest values of options of this command.


@refusing()
def main(arguments: Sequence[str]) -> int:
    """Run the study and return its exit code.

    Returns:
        0 if done, 1 if no trial gave a score, 130 or 143 after SIGINT or SIGTERM with everything saved. Wrong options
        exit with 2, an unreadable study with 3.
    """
    options, words = parsed(parser(), arguments)
    library()
    if "evaluator.steps" in split(words)[0]:
        raise ConfigurationError("--evaluator.steps is not yours to give here: --evaluations says how many there are")
    if options.plot:
        figures.pyplot()  # Fail before hours of training rather than after.
    template = options_of(options.config, words, options.name, options.root)
    if template.steps is None:
        raise ConfigurationError(f"{template.config} has no number of steps: give one, as -- --steps 100000")
    if template.target_score is not None:
        raise ConfigurationError("trials that end at a target_score have no late score: give -- --target_score none")
    check_numbers(options, template)
    parts, folder = ranges(template, options.ranges, split(words)[0]), Path(options.root) / "logs" / options.name
    words += ["--evaluator.steps", str(max(template.steps // options.evaluations, 1))]
    warmup = options.evaluations // 4 if options.warmup is None else options.warmup
    with claimed(folder), relay_output():
        study = Study(template, words, parts, folder, options.startup, warmup, options.seed)
        exit_code = study.run(options.trials)
    study.write_table()
    if exit_code or not study.best:
        return exit_code or 1
    if options.plot:
        print(study.draw())
    row, others = study.best_row()
    given = f" (train it with {others})" if others else ""
    print(f"best of {study.finished} trials, score {study.best.value:.2f}, as a row of CONFIGS{given}:\n{row}")
    return 0


def check_numbers(options: argparse.Namespace, template: Options) -> None:
    """Raise ConfigurationError if numbers of the command line are out of bounds."""
    numbers = {name: getattr(options, name) for name in LOWEST}
    low = {name: number for name, number in numbers.items() if number is not None and number < LOWEST[name]}
    errors = [f"--{name}={number} must be at least {LOWEST[name]}" for name, number in low.items()]
    errors += changed(template, {"seed": options.seed}, "--")[1].values()
    if errors:
        raise ConfigurationError(errors)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m utils.tune", description=__doc__, formatter_class=shape)
    add = parser.add_argument
    add("--config", required=True, help="row of CONFIGS")
    add("--trials", type=int, default=20, help="trials of the study, including those of earlier starts")
    add(
        "--ranges",
        nargs="+",
        default=[],
        help="options to tune, with a range where none is declared; default: all declared",
    )
    add("--startup", type=int, default=5, help="trials with random values, before any trial is ended early")
    add("--warmup", type=int, help="evaluations before a run may be ended early; default: a quarter")
    add("--evaluations", type=int, default=20, help="evaluations of a run, evenly over its steps")
    add("--seed", type=int, default=1, help="seed of the runs and of the sampler")
    add("--plot", action="store_true", help="draw logs/<name>/trials.png; needs matplotlib")
    add("--name", default="tune", help="name of the study and of its runs")
    add("--root", type=os.path.expanduser, default=PROJECT, help="folder of models/ and logs/")
    return parser


class Study:
    """A study that is kept in folder/study.log, where a later start finds its trials again.

    The caller must hold the lock of the folder. All runs have the options `template` in common, which these words set.
    The parser's help explains startup, warmup and seed.

    Raises:
        ConfigurationError: optuna is not installed, or the study is unreadable or has other ranges or options.
    """

    def __init__(
        self,
        template: Options,
        words: list[str],
        ranges: list[Range],
        folder: Path,
        startup: int,
        warmup: int,
        seed: int,
    ):
        self._optuna = library()
        self._template, self._words, self._ranges, self._folder = template, words, ranges, folder
        journal = folder.resolve() / "study.log"  # optuna's lock is a link to this path.
        if journal.exists():
            repair(journal)
        storage = self._optuna.storages.JournalStorage(self._optuna.storages.journal.JournalFileBackend(str(journal)))
        self._study = self._optuna.create_study(
            study_name=folder.name,
            storage=storage,
            load_if_exists=True,
            direction="maximize",
            pruner=self._optuna.pruners.MedianPruner(startup, warmup),
        )
        # The number of trials is in the seed, so that a later start draws other values.
        sampler_seed = (seed + len(self.trials)) % 2**32  # numpy takes no larger seed.
        self._study.sampler = self._optuna.samplers.TPESampler(n_startup_trials=startup, seed=sampler_seed)
        self._seed, self._warmup, self._interrupts = seed, warmup, SignalForwarder(())
        texts = {part.name: part.text for part in ranges}
        self._check_definition({"config": template.config, "words": self._words, "seed": seed, "ranges": texts})

    # trials ---------------------------------------------------------------------------------------------------------
    def run(self, trials: int) -> int:
        """Run until this many trials are finished; return 0, or 128 plus the number of the signal that ended it."""
        with self._interrupts:
            states = self._optuna.trial.TrialState
            for unfinished in self._study.get_trials(states=(states.RUNNING,)):
                self._run(self._optuna.trial.Trial(self._study, unfinished._trial_id))
            while self.finished < trials and not self._interrupts:
                self._run(self._study.ask({part.name: self._distribution(part) for part in self._ranges}))
        return self._interrupts.exit_code

    def _run(self, trial: Any) -> None:
        """Run a trial and report its outcome to optuna, unless a signal ended it.

        Raises:
            ConfigurationError: a run of this trial's name exists with other options.
        """
        states = self._optuna.trial.TrialState
        try:
            run = self._child(trial)
        except ConfigurationError as refused:
            self._report(trial, states.FAIL, {}, "; ".join(refused.problems))
            return
        run.check()
        pruned = self._watch(run)
        if pruned and self._has_made_all_steps(run.lines):
            # The run ended meanwhile and lacks only its last evaluation.
            run = self._child(trial)
            pruned = self._watch(run)
        scores = self._scores(run, run.lines)
        if run.complete and scores:
            self._report(trial, states.COMPLETE, scores, "")
        elif run.complete:
            self._report(trial, states.FAIL, {}, f"was never evaluated: see {run.output}")
        elif pruned:
            self._report(trial, states.PRUNED, scores, "ended early")
        elif not self._interrupts:
            self._report(trial, states.FAIL, {}, f"ended with exit code {run.exit_code}: see {run.output}")

    def _watch(self, run: ChildRun) -> bool:
        """Train to the end or until the pruner ends the trial; return True for the latter."""
        pruned, self._interrupts.runs = False, [run]
        if run.complete:
            return False
        if not wait_until_idle(run, self._interrupts) and not self._interrupts:
            raise ConfigurationError(
                f"run {run.options.signature} is still being trained by an earlier start: begin again when it has ended"
            )
        if not self._interrupts:
            run.start(os.sched_getaffinity(0))
            self._interrupts.forward()
            looked = time.monotonic()
            while run.exit_code is None:
                time.sleep(POLL)
                if not pruned and time.monotonic() - looked >= LOOK_PERIOD:
                    if pruned := self._should_prune(run):
                        run.interrupt()
                    looked = time.monotonic()
        return pruned and not self._interrupts

    def _should_prune(self, run: ChildRun) -> bool:
        """Return True if the pruner would end this run now.

        A run that has made all its steps is never ended, because its last evaluation is due. Nor is one with fewer
        scores than the warmup: the pruner counts evaluation periods, some of which a slow evaluation skips. The pruner
        receives the current curve, because a resumed run may have lost the end of an earlier one.
        """
        lines = run.lines
        scores = self._scores(run, lines)
        if len(scores) < max(self._warmup, 1) or self._has_made_all_steps(lines):
            return False
        trial = self._optuna.trial.create_trial(state=self._optuna.trial.TrialState.RUNNING, intermediate_values=scores)
        return bool(self._study.pruner.prune(self._study, trial))

    def _scores(self, run: ChildRun, lines: Sequence[dict[str, Any]]) -> dict[int, float]:
        """Return the trial's score after each of its evaluations; the last one is the score of the trial.

        A score is the late score of the curve up to that evaluation. Keys count evaluation periods, so that trials can
        be compared. Of several evaluations in one period the last one counts.
        """
        steps, period = self._template.steps, run.options.evaluator.steps
        curve = until(curve_of(lines), steps)
        return {
            int(step // period): late_score(Curve(*(column[:count] for column in curve)), steps)
            for count, step in enumerate(curve.steps, 1)
        }

    def _has_made_all_steps(self, lines: Sequence[dict[str, Any]]) -> bool:
        """Return True if the last log period says so, which lags behind by at most one period of the logger."""
        steps = curve_of(lines, PERIOD).steps
        return bool(steps.size) and steps[-1] >= (self._template.steps or float("inf"))

    def _child(self, trial: Any) -> ChildRun:
        words = [*self._words, *words_of(trial.params)]
        options = options_of(self._template.config, words, self._template.machine, self._template.root)
        name = f"trial{trial.number}"
        options = dataclasses.replace(options, timestamp=name, seed=self._seed)
        return ChildRun(options, words, self._folder / f"{name}.txt")

    def _report(self, trial: Any, state: Any, scores: Mapping[int, float], remark: str) -> None:
        """Report scores and state to optuna, which keeps the last score as the value of a complete or pruned trial."""
        score = list(scores.values())[-1] if scores else None
        # A start that was killed before it reported the state has reported some scores.
        reported = self.trials[trial.number].intermediate_values
        for number, value in scores.items():
            if number not in reported:
                trial.report(value, number)
        self._study.tell(trial, score if state.name == "COMPLETE" else None, state=state)
        values = {name: f"{of:.4g}" if isinstance(of, float) else of for name, of in trial.params.items()}
        settings = ", ".join(f"{name}={value}" for name, value in values.items())
        outcome = ", ".join(part for part in ("" if score is None else f"score {score:.2f}", remark) if part)
        print(f"trial {trial.number}: {settings}: {outcome}", flush=True)

    # results --------------------------------------------------------------------------------------------------------
    @property
    def trials(self) -> list[Any]:
        """Return optuna's trials, in order."""
        trials: list[Any] = self._study.get_trials(deepcopy=False)
        return trials

    @property
    def finished(self) -> int:
        """Return the number of complete, pruned and failed trials."""
        return sum(trial.state.is_finished() for trial in self.trials)

    @property
    def best(self) -> Any:
        """Return the complete trial of the highest score, or None. Pruned trials made fewer steps and do not count."""
        complete = [trial for trial in self.trials if trial.state.name == "COMPLETE"]
        return max(complete, key=lambda trial: trial.value, default=None)

    def best_row(self) -> tuple[str, str]:
        """Return the best trial as a row of CONFIGS, with the options that differ from the defaults of its classes.

        Returns:
            The row, and the words of the command line for those of its options that a row cannot have.
        """
        trained = self._child(self.best).options  # The trial's classes may have other options than the template's.
        evaluator = dataclasses.replace(trained.evaluator, steps=self._template.evaluator.steps)
        options = dataclasses.replace(trained, evaluator=evaluator)
        defaults = class_defaults(options)
        row = {"name": f"{options.config}-tuned", **{name: getattr(options, name) for name in CHOICES}}
        different = {name: value for name, value in flatten(options).items() if value != defaults[name]}
        row |= {name: value for name, value in different.items() if "." in name or name in OPEN_LINES}
        beside = {name: value for name, value in different.items() if name not in (*row, "seed") and counts(name)}
        # Spaces within an option do not break a line, because a text may not go on in the next one.
        items = ", ".join(f'"{name}": {_literal(value)}'.replace(" ", "\xa0") for name, value in row.items())
        lines = textwrap.wrap(items + "}", WIDTH + 1, break_long_words=False, break_on_hyphens=False)
        return ("    {" + "\n     ".join(lines) + ",").replace("\xa0", " "), shlex.join(words_of(beside))

    def write_table(self) -> None:
        """Write folder/trials.csv, a line per trial."""
        with (self._folder / "trials.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["trial", "state", "score", *(part.name for part in self._ranges)])
            for trial in self.trials:
                values = [trial.params.get(part.name, "") for part in self._ranges]
                writer.writerow([trial.number, trial.state.name.lower(), trial.value, *values])

    def draw(self) -> Path:
        """Draw folder/trials.png, the score against each option, and return the file."""
        ended = [trial for trial in self.trials if trial.state.name in ("COMPLETE", "PRUNED")]
        axes = {part.name: part.kind == "log" for part in self._ranges}
        figure = figures.draw_trials(axes, ended, f"trials of {self._template.config}")
        return figures.save(figure, self._folder / "trials", ["png"])[0]

    # the study ------------------------------------------------------------------------------------------------------
    def _distribution(self, part: Range) -> Any:
        distributions = self._optuna.distributions
        if part.kind == "choice":
            # optuna stores no tuples, therefore the texts.
            several = any(isinstance(value, tuple) for value in part.values)
            return distributions.CategoricalDistribution(split_values(part.text) if several else part.values)
        whole = all(type(value) is int for value in part.values)
        kind = distributions.IntDistribution if whole else distributions.FloatDistribution
        return kind(*part.values, log=part.kind == "log")

    def _check_definition(self, definition: dict[str, Any]) -> None:
        """Store the definition of a new study. Raise ConfigurationError if the study exists with another one."""
        old = self._study.user_attrs.get("told", definition)
        if different := [f"{key}: {old[key]} there, {now} here" for key, now in definition.items() if old[key] != now]:
            raise ConfigurationError(
                f"study {self._folder} exists with another definition ({', '.join(different)}): choose another name"
            )
        self._study.set_user_attr("told", definition)


def repair(journal: Path) -> None:
    """Remove an incomplete last line from optuna's journal, because further lines would be unreadable after it.

    Raises:
        ConfigurationError: a complete line is no record of optuna (exit code 3).
    """
    *lines, rest = journal.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            json.loads(line)["op_code"]
        except (ValueError, TypeError, KeyError):
            raise ConfigurationError(
                f"{journal}, line {number} is no record of a study: restore the file, or choose another name",
                BAD_CHECKPOINT,
            ) from None
    os.truncate(journal, journal.stat().st_size - len(rest))


def library() -> Any:
    """Return the module optuna, or raise ConfigurationError if it is not installed."""
    optuna = import_extra("tuning", "optuna", "tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) and '"' not in value else repr(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
