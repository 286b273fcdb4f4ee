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
import sys
from collections.abc import Sequence
from pathlib import Path

from core.common.terminal import relay_output
from utils.config.command_line import refuse
from utils.errors import ConfigurationError
from utils.options import PROJECT
from utils.plot.figures import pyplot
from utils.sweep.scheduler import claimed
from utils.sweep.subprocess_run import options_of
from utils.tune.ranges import ranges
from utils.tune.study import Study, library


def main(arguments: Sequence[str]) -> int:
    """Run the study and return its exit code.

    Returns:
        0 if done, 1 if no trial gave a score, 130 or 143 after SIGINT or SIGTERM with everything saved. Wrong options
        exit with 2.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser().parse_args(arguments[:end])
    words = list(arguments[end + 1 :])
    try:
        library()
        if options.plot:
            pyplot()  # Fail before hours of training rather than after.
        template = options_of(options.config, words, options.name, options.root)
        if template.steps is None:
            raise ConfigurationError(f"{template.config} has no number of steps: give one, as -- --steps 100000")
        words += ["--evaluator.steps", str(max(template.steps // options.evaluations, 1))]
        parts, folder = ranges(template, options.ranges), Path(options.root) / "logs" / options.name
        warmup = options.evaluations // 4 if options.warmup is None else options.warmup
        with claimed(folder), relay_output():
            study = Study(template, words, parts, folder, options.startup, warmup, options.seed)
            exit_code = study.run(options.trials)
    except ConfigurationError as refused:
        refuse(refused)
    study.write_table()
    if exit_code or not study.best:
        return exit_code or 1
    if options.plot:
        print(study.draw())
    print(f"best of {study.finished} trials, score {study.best.value:.2f}, as a row of CONFIGS:\n{study.best_row()}")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m utils.tune", description=__doc__, formatter_class=shape)
    parser.add_argument("--config", required=True, help="row of CONFIGS")
    parser.add_argument("--trials", type=int, default=20, help="trials of the study, including those of earlier starts")
    parser.add_argument(
        "--ranges",
        nargs="+",
        default=[],
        help="options to tune, with a range where none is declared; default: all declared",
    )
    parser.add_argument(
        "--startup", type=int, default=5, help="trials with random values, before any trial is ended early"
    )
    parser.add_argument("--warmup", type=int, help="evaluations before a run may be ended early; default: a quarter")
    parser.add_argument("--evaluations", type=int, default=20, help="evaluations of a run, evenly over its steps")
    parser.add_argument("--seed", type=int, default=1, help="seed of the runs and of the sampler")
    parser.add_argument("--plot", action="store_true", help="draw logs/<name>/trials.png; needs matplotlib")
    parser.add_argument("--name", default="tune", help="name of the study and of its runs")
    parser.add_argument("--root", default=PROJECT, help="folder of models/ and logs/")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
