"""The last word of a run that did not end by itself: how to go on."""

import shlex
from typing import Any


def how_to_go_on(options: Any) -> str:
    """The command that continues the run, if a checkpoint is there. `options` is a utils.options.Options."""
    if any(options.checkpoint_folder.glob("step_*")):
        root = "" if options.root == type(options).root else f" --root {shlex.quote(options.root)}"
        return f"continue this run with: python main.py --config {options.config} --resume {options.signature}{root}"
    return (f"no checkpoint had been written yet (one is due every {options.learner.checkpoint_period:g} s, "
            "learner.checkpoint_period): this run cannot be continued, start a new one")
