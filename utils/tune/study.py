"""A study of optuna whose trials are runs of main.py, ended early where optuna says so."""

import csv
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.config.dotted_settings import flatten, split_values
from utils.config.rows import CHOICES, from_row
from utils.errors import ConfigurationError
from utils.options import Options
from utils.plot import figures
from utils.plot.curves import METRICS, Curve, late_score, reached, read_curve, until
from utils.plot.seed_groups import STOPS
from utils.sweep.scheduler import POLL, SignalForwarder, wait_until_left
from utils.sweep.subprocess_run import ChildRun, named, options_of
from utils.tune.ranges import Range

LINES = (*STOPS, "num_envs_per_actor")  # that a printed row has
WIDTH = 130                             # of its text


class Study:
    """Kept in folder/study.log, where a later start finds its trials again. `template`: what the runs have in common, as `words` say it.
    Whoever makes one has claimed its folder.

    Raises Refused without optuna, and for a study that exists with other ranges or settings.
    """

    def __init__(self, template: Options, words: Sequence[str], ranges: Sequence[Range], folder: Path, startup: int, warmup: int,
                 seed: int):
        self._optuna = library()
        self._template, self._words, self._ranges, self._folder = template, list(words), ranges, folder
        journal = _whole(folder.resolve() / "study.log")  # resolved, as a lock beside it is a link to it
        storage = self._optuna.storages.JournalStorage(self._optuna.storages.journal.JournalFileBackend(str(journal)))
        self._study = self._optuna.create_study(study_name=folder.name, storage=storage, load_if_exists=True, direction="maximize",
                                                pruner=self._optuna.pruners.MedianPruner(startup, warmup))
        begun = len(self._study.get_trials(deepcopy=False))  # so that a later start draws others
        self._study.sampler = self._optuna.samplers.TPESampler(n_startup_trials=startup, seed=seed + begun)
        self._seed, self._interrupts = seed, SignalForwarder(())
        self._keep({"config": template.config, "words": self._words, "seed": seed, "ranges": {part.name: part.text for part in ranges}})

    # trials -------------------------------------------------------------------------------------------------------------
    def run(self, trials: int) -> int:
        """Until so many are finished. Returns 0, or 128 and the signal that ended it."""
        with self._interrupts:
            states = self._optuna.trial.TrialState
            for unfinished in self._study.get_trials(states=(states.RUNNING,)):
                self._run(self._optuna.trial.Trial(self._study, unfinished._trial_id))
            while self.finished < trials and not self._interrupts:
                self._run(self._study.ask({part.name: self._distribution(part) for part in self._ranges}))
        return self._interrupts.exit_code

    def _run(self, trial: Any) -> None:
        """Tell optuna what this trial came to; nothing if a signal ended it."""
        states = self._optuna.trial.TrialState
        try:
            run = self._child(trial)
        except ConfigurationError as refused:
            self._tell(trial, states.FAIL, {}, "; ".join(refused.problems))
            return
        pruned = self._watch(run)
        if pruned and self._has_spent_its_budget(run):  # it made its last steps meanwhile and lacks an evaluation only
            run = self._child(trial)
            pruned = self._watch(run)
        scores = self._scores(run)
        if run.complete and scores:
            self._tell(trial, states.COMPLETE, scores, "")
        elif run.complete:
            self._tell(trial, states.FAIL, {}, f"was never evaluated: see {run.output}")
        elif pruned:
            self._tell(trial, states.PRUNED, scores, "ended early")
        elif not self._interrupts:
            self._tell(trial, states.FAIL, {}, f"ended with exit code {run.exit_code}: see {run.output}")

    def _watch(self, run: ChildRun) -> bool:
        """Train to the end, or to where the pruner gives the trial up. Returns True for the latter."""
        pruned, self._interrupts.runs = False, [run]
        if not run.complete and wait_until_left(run, self._interrupts) and not self._interrupts:
            run.start(os.sched_getaffinity(0))
            self._interrupts.tell()
            while run.exit_code is None:
                time.sleep(POLL)
                if not pruned and self._is_hopeless(run):
                    pruned = True
                    run.interrupt()
        return pruned and not self._interrupts

    def _is_hopeless(self, run: ChildRun) -> bool:
        """Return True if the pruner would end this run now. A run that has made its steps is never ended: its last evaluation is due.

        The pruner is shown the curve as it is now, because a run that was continued may have given up a part that it had.
        """
        scores = self._scores(run)
        if not scores or self._has_spent_its_budget(run):
            return False
        trial = self._optuna.trial.create_trial(state=self._optuna.trial.TrialState.RUNNING, intermediate_values=scores)
        return bool(self._study.pruner.prune(self._study, trial))

    def _scores(self, run: ChildRun) -> dict[int, float]:
        """Return the trial's score after each of its evaluations; the last of them is the trial's score.

        A score is the late score of the curve up to there. Keys number the evaluations as they are due, so that those of all trials
        compare; of several in one period the last one counts.
        """
        curve, period = until(read_curve(run.options.log_folder / METRICS), self._template.steps), run.options.evaluator.steps
        return {int(step // period): late_score(Curve(*(column[:count] for column in curve)), self._template.steps)
                for count, step in enumerate(curve.steps, 1)}

    def _has_spent_its_budget(self, run: ChildRun) -> bool:
        return reached(run.options.log_folder / METRICS) >= (self._template.steps or float("inf"))

    def _child(self, trial: Any) -> ChildRun:
        words = [*self._words, *(word for name, value in trial.params.items() for word in (f"--{name}", str(value)))]
        options = options_of(self._template.config, words, self._template.machine, self._template.root)
        name = f"trial{trial.number}"
        return ChildRun(named(options, name, self._seed), words, self._folder / f"{name}.txt")

    def _tell(self, trial: Any, state: Any, scores: Mapping[int, float], remark: str) -> None:
        """Give optuna the scores and the state. It keeps the last score as the value of a trial, of one that was ended early too."""
        score = list(scores.values())[-1] if scores else None
        reported = self.trials[trial.number].intermediate_values  # by a start that was killed before it told the state
        for number, value in scores.items():
            if number not in reported:
                trial.report(value, number)
        self._study.tell(trial, score if state.name == "COMPLETE" else None, state=state)
        settings = ", ".join(f"{name}={f'{value:.4g}' if isinstance(value, float) else value}" for name, value in trial.params.items())
        outcome = ", ".join(part for part in ("" if score is None else f"score {score:.2f}", remark) if part)
        print(f"trial {trial.number}: {settings}: {outcome}", flush=True)

    # results ------------------------------------------------------------------------------------------------------------
    @property
    def trials(self) -> list[Any]:
        return self._study.get_trials(deepcopy=False)

    @property
    def finished(self) -> int:
        return sum(trial.state.is_finished() for trial in self.trials)

    @property
    def best(self) -> Any:
        """Return the trial of the highest score, or None, of those that went to their end: the others' are of fewer steps."""
        complete = [trial for trial in self.trials if trial.state.name == "COMPLETE"]
        return max(complete, key=lambda trial: trial.value, default=None)

    def best_row(self) -> str:
        """A row of CONFIGS that does what the best trial did: what differs from the defaults of its classes."""
        trained = self._child(self.best).options  # its classes may have other settings than the template's
        evaluator = dataclasses.replace(trained.evaluator, steps=self._template.evaluator.steps)
        options = dataclasses.replace(trained, evaluator=evaluator)
        plain, _ = from_row({"name": options.config, **{name: getattr(options, name) for name in CHOICES}})
        defaults = flatten(plain)
        row = {"name": f"{options.config}-tuned", **{name: getattr(options, name) for name in CHOICES}, **{
            name: value for name, value in flatten(options).items() if value != defaults[name] and ("." in name or name in LINES)}}
        return _wrapped([f'"{name}": {_literal(value)}' for name, value in row.items()])

    def write_table(self) -> None:
        """folder/trials.csv: a line for each trial."""
        with (self._folder / "trials.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["trial", "state", "score", *(part.name for part in self._ranges)])
            for trial in self.trials:
                values = [trial.params.get(part.name, "") for part in self._ranges]
                writer.writerow([trial.number, trial.state.name.lower(), trial.value, *values])

    def draw(self) -> Path:
        """folder/trials.png: score against each setting."""
        trials = [(trial.state.name == "COMPLETE", trial.value, {name: value if isinstance(value, (int, float)) else str(value)
                                                                  for name, value in trial.params.items()})
                  for trial in self.trials if trial.state.name in ("COMPLETE", "PRUNED")]
        figure = figures.draw_trials({part.name: part.kind == "log" for part in self._ranges}, trials, f"trials of {self._template.config}")
        return figures.save(figure, self._folder / "trials", ["png"])[0]

    # the study ----------------------------------------------------------------------------------------------------------
    def _distribution(self, part: Range) -> Any:
        distributions = self._optuna.distributions
        if part.kind == "choice":
            several = any(isinstance(value, tuple) for value in part.values)  # which optuna cannot keep: it draws what was written
            return distributions.CategoricalDistribution(split_values(part.text) if several else part.values)
        kind = distributions.IntDistribution if all(type(value) is int for value in part.values) else distributions.FloatDistribution
        return kind(*part.values, log=part.kind == "log")

    def _keep(self, told: dict[str, Any]) -> None:
        before = self._study.user_attrs.get("told", told)
        if before != told:
            different = ", ".join(f"{name}: {before[name]} there, {told[name]} here" for name in told if before[name] != told[name])
            raise ConfigurationError([f"study {self._folder} exists and was told something else ({different}): choose another name"])
        self._study.set_user_attr("told", told)


def library() -> Any:
    """optuna. Raises Refused where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigurationError(['tuning needs optuna, which is not installed: pip install -e ".[tune]"']) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _whole(journal: Path) -> Path:
    """Without a last line that its writer did not get to end: what came after it would be unreadable too."""
    if journal.exists():
        with journal.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    return journal


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) and '"' not in value else repr(value)


def _wrapped(items: Sequence[str]) -> str:
    lines = [""]
    for item in items:
        if lines[-1] and len(lines[-1]) + len(item) > WIDTH:
            lines.append("")
        lines[-1] += f"{item}, "
    return "    {" + "\n     ".join(line.rstrip() for line in lines).rstrip(",") + "},"
