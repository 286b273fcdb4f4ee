"""Generate docs/rows.md from CONFIGS: python -m utils.config.rows_page > docs/rows.md.

Every row of CONFIGS is one line of the page. Measured results cannot be computed from CONFIGS; MEASURED keeps them.
"""

from collections.abc import Mapping
from typing import Any

from utils.options import CONFIGS

INTRODUCTION = """\
# Rows of CONFIGS

A row is one experiment: `python main.py --config <row>` runs it. This page is generated from `CONFIGS` in
`utils/options.py` by

```bash
.venv/bin/python -m utils.config.rows_page > docs/rows.md
```

- *Capacity* is in agent steps or, for memories of unrolls, in unrolls. A million steps of 84x84 Atari take 7.1 GB, and
  less than 0.5 GB with `storage.codec lz4`. The 150,000 steps of 42x42 Pong take 0.3 GB, a million steps of the MuJoCo
  rows 0.2 GB.
- *Steps* are the agent steps after which the row stops by itself.
- *Measured* scores are means of evaluations. [Results](results/README.md) has the command and the data of each. Rows
  without an entry have not been measured.

Some rows need an extra: MinAtar `minatar`, MuJoCo `mujoco` or `dm-control`, `d4pg-walker-walk` `dm-control`,
`ddpg-pendulum-legacy` `legacy-gym`, `dqn-carracing` `box2d`.

| rows | algorithm |
|---|---|
| `dqn-pong-small` | double dueling DQN, prioritized replay, 3 steps; a small network for two CPU cores |
| `dqn-pong`, `dqn-breakout`, `dqn-carracing` | double DQN, prioritized, 5, 3 and 3 steps; the latter two dueling |
| `dqn-cartpole`, `dqn-minatar-breakout` | double DQN, uniform replay, 3 steps and 1 step |
| `dqn-pong-uniform` | DQN as in Nature 2015, with Adam |
| `*-pong-gpu` | DQN, Rainbow, R2D2, each with replay on the GPU; IMPALA, deep network: [not measured](results/gpu.md) |
| `apex-*` | Ape-X DQN |
| `ddqn-*`, `prior-ddqn-*` | double DQN with GroupNorm and lz4 frames, uniform or prioritized replay |
| `rainbow-*`, `rainbow-quantile-*`, `rainbow-no-*` | Rainbow: with C51, with quantiles, without one of its parts |
| `r2d2-*` | R2D2 |
| `impala-*` | V-trace; `impala-lstm-recall` with an LSTM |
| `impala-breakout-*`, `replay-*`, `attentive-*`, `elite*` | V-trace with replay of unrolls |
| `clear-*`, `laser-*` | CLEAR with 50 % and LASER with 75 % replay |
| `impact-*` | IMPACT: four batches, each used twice |
| `ddpg-*`, `d4pg-*`, `td3-*`, `sac-*` | DDPG, D4PG, TD3, SAC |

"""
COLUMNS = ("row", "agent", "environment", "game", "model", "memory", "capacity", "steps", "measured")
RESULTS = "results/README.md"
SMALL, CONTROL = f"{RESULTS}#small-tasks", f"{RESULTS}#continuous-control"
RULES = f"{RESULTS}#replay-for-v-trace-seven-rules-three-seeds-each-on-minatar-breakout"
RAINBOW = f"{RESULTS}#rainbow-against-dqn-three-seeds-each-on-minatar-breakout"
MEASURED: dict[str, tuple[str, str]] = {  # row -> result, and where the page says how it was measured
    "dqn-pong-small": (
        "20.2, 20.5, 20.0 after 368 k, 438 k, 405 k steps", f"{RESULTS}#dqn-pong-small-20-with-each-of-three-seeds"),
    "dqn-cartpole": ("500, three seeds", f"{RESULTS}#dqn-cartpole-500-with-each-of-three-seeds"),
    "dqn-minatar-breakout": ("12.8 to 14.7 at 1 M steps, three seeds", f"{RESULTS}#dqn-minatar-breakout-three-seeds"),
    "rainbow-cartpole": ("500, three seeds", SMALL),
    "rainbow-minatar-breakout": ("8.16 at 200 k steps, mean of three seeds; DQN 6.26", RAINBOW),
    "rainbow-no-double-minatar-breakout": ("4.76 at 60 k steps, mean of three seeds; Rainbow 4.74", RAINBOW),
    "rainbow-no-dueling-minatar-breakout": ("3.68 at 60 k steps, mean of three seeds", RAINBOW),
    "rainbow-no-noisy-minatar-breakout": ("3.83 at 60 k steps, mean of three seeds", RAINBOW),
    "rainbow-no-prioritized-minatar-breakout": ("4.25 at 60 k steps, mean of three seeds", RAINBOW),
    "rainbow-no-nstep-minatar-breakout": ("3.95 at 60 k steps, mean of three seeds", RAINBOW),
    "rainbow-no-distributional-minatar-breakout": ("5.31 at 60 k steps, mean of three seeds", RAINBOW),
    "rainbow-quantile-minatar-breakout": ("5.44 at 60 k steps, mean of three seeds", RAINBOW),
    "r2d2-recall": ("1.0, the maximum, three seeds", SMALL),
    "r2d2-minatar-breakout": (
        "19.0 to 24.6 at 300 k steps, three seeds", f"{RESULTS}#r2d2-minatar-breakout-22-after-300-k-steps-three-seeds"),
    "r2d2-cartpole": ("459 to 500, three seeds", SMALL),
    "impala-pong-small": (
        "18.5, 19.7, 19.5 after 3.4 M, 9.0 M, 4.5 M steps", f"{RESULTS}#impala-pong-small-18-and-more-three-seeds"),
    "impala-cartpole": ("457 to 492 at 1 M steps, three seeds", SMALL),
    "impact-cartpole": ("458 to 487 at 1 M steps, three seeds", SMALL),
    "impala-lstm-recall": ("0.99 to 1.0, the maximum, three seeds", SMALL),
    "impala-minatar-breakout": ("4.86 at 500 k steps, mean of three seeds", RULES),
    "replay-minatar-breakout": ("5.65 at 500 k steps, mean of three seeds", RULES),
    "clear-minatar-breakout": ("5.18 at 500 k steps, mean of three seeds", RULES),
    "laser-minatar-breakout": ("5.68 at 500 k steps, mean of three seeds", RULES),
    "attentive-minatar-breakout": ("5.77 at 500 k steps, mean of three seeds", RULES),
    "elite1-minatar-breakout": ("5.80 at 500 k steps, mean of three seeds", RULES),
    "elite3-minatar-breakout": ("6.41 at 500 k steps, mean of three seeds", RULES),
    "ddpg-pendulum": ("-151.9, mean of three seeds", CONTROL), "d4pg-pendulum": ("-141.7, mean of three seeds", CONTROL),
    "td3-pendulum": ("-148.4, mean of three seeds", CONTROL), "sac-pendulum": ("-138.7, mean of three seeds", CONTROL),
    "ddpg-inverted-pendulum": ("1,000, the maximum, three seeds", CONTROL),
    "d4pg-inverted-pendulum": ("950, mean of three seeds", CONTROL),
    "ddpg-reacher": ("-5.5, mean of three seeds", CONTROL), "d4pg-reacher": ("-6.7, mean of three seeds", CONTROL),
    "ddpg-hopper": ("257 after 50 k of 1 M steps, mean of three seeds", CONTROL),
    "d4pg-hopper": ("405 after 50 k of 1 M steps, mean of three seeds", CONTROL)}


def page() -> str:
    """Return the whole text of docs/rows.md."""
    return "".join([INTRODUCTION, f"| {' | '.join(COLUMNS)} |\n", "|---" * len(COLUMNS) + "|\n", *map(_line, CONFIGS)])


def _line(row: Mapping[str, Any]) -> str:
    result, link = MEASURED.get(row["name"], ("", ""))
    choices = [f"`{row[name]}`" for name in ("name", "agent_type", "env_type", "model_type", "memory_type")]
    choices.insert(3, row["game"])
    steps, measured = f"{row['steps']:,}" if "steps" in row else "", f"[{result}]({link})" if result else ""
    return f"| {' | '.join([*choices, _capacity(row), steps, measured])} |\n"


def _capacity(row: Mapping[str, Any]) -> str:
    """Return the capacity that the row sets, or that its replay list gives to each member."""
    members = row.get("memory.replay_parameters", ())
    if members:
        return ", ".join(f"{member['type']} {member['capacity']:,}" for member in members)
    return f"{row['memory.capacity']:,}" if "memory.capacity" in row else ""


if __name__ == "__main__":
    print(page(), end="")
