"""Generate docs/rows.md from CONFIGS: python -m utils.config.rows_page > docs/rows.md.

Every row of CONFIGS is one line of the page. Measured results come from docs/results/rows.csv.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
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
  less than 0.5 GB with `replay.frame_compression lz4`. The 150,000 steps of 42x42 Pong take 0.3 GB, a million steps
  of the MuJoCo
  rows 0.2 GB.
- *Steps* are the agent steps after which the row stops by itself.
- *Measured* scores are means of evaluations. [Results](results/README.md) has the command and the data of each. Rows
  without an entry have not been measured.

Some rows need an extra: MinAtar `minatar`, MuJoCo `mujoco` or `dm-control`, `d4pg-walker-walk` `dm-control`,
`ddpg-pendulum-legacy` `legacy-gym`, `dqn-carracing` `box2d`, `ppo-minigrid-doorkey` `minigrid`, `sac-point-maze`
`robotics`.

| rows | algorithm |
|---|---|
| `dqn-pong-small` | double dueling DQN, prioritized replay, 3 steps; a small network for two CPU cores |
| `dqn-pong`, `dqn-breakout`, `dqn-carracing` | double DQN, prioritized, 5, 3 and 3 steps; the latter two dueling |
| `dqn-cartpole`, `dqn-minatar-breakout` | double DQN, uniform replay, 3 steps and 1 step |
| `dqn-pong-uniform` | DQN as in Nature 2015, with Adam |
| `*-pong-gpu` | DQN, Rainbow, IQN, R2D2 with replay on the GPU; PQN; deep IMPALA: [not measured](results/gpu.md) |
| `apex-*` | Ape-X DQN |
| `ddqn-*`, `prior-ddqn-*` | double DQN with GroupNorm and lz4 frames, uniform or prioritized replay |
| `rainbow-*`, `rainbow-quantile-*`, `rainbow-no-*` | Rainbow: with C51, with quantiles, without one of its parts |
| `nature-*`, `double-*`, `dueling-*`, `prioritized-*` | Nature DQN with RMSProp, and double DQN with one more part |
| `c51-*`, `qr-*`, `iqn-*` | C51, QR-DQN, IQN: distributions without the other parts of Rainbow |
| `munchausen-dqn-*`, `munchausen-iqn-*` | Munchausen DQN and IQN |
| `btr-*` | BTR: Munchausen IQN, dueling, noisy, prioritized; on Atari with a wide, normalised residual network |
| `machado-*` | sticky actions, all 18 actions, no lives |
| `r2d2-*` | R2D2 |
| `impala-*` | V-trace; `impala-lstm-recall` with an LSTM |
| `impala-breakout-*`, `replay-*`, `attentive-*`, `elite*` | V-trace with replay of unrolls |
| `clear-*`, `laser-*` | CLEAR with 50 % and LASER with 75 % replay |
| `impact-*` | IMPACT: four batches, each used twice |
| `ppo-*`, `a2c-*` | PPO, synchronous, with CleanRL's settings; A2C as one epoch of one minibatch |
| `pqn-*` | PQN with its authors' settings |
| `ppo-hopper-multidiscrete` | PPO of several choices at once: one of 7 torques for each joint |
| `dqn-tictactoe`, `ppo-tictactoe` | tic-tac-toe against random play, with masks of legal actions |
| `ddpg-*`, `d4pg-*`, `td3-*`, `sac-*` | DDPG, D4PG, TD3, SAC |

"""
COLUMNS = ("row", "agent", "environment", "game", "model", "memory", "capacity", "steps", "measured")
# Row, result, page and heading of docs/results.
MEASURED = Path(__file__).resolve().parents[2] / "docs" / "results" / "rows.csv"


def page() -> str:
    """Return the whole text of docs/rows.md."""
    results = measured()
    lines = [_line(row, results.get(row["name"], "")) for row in CONFIGS]
    return "".join([INTRODUCTION, f"| {' | '.join(COLUMNS)} |\n", "|---" * len(COLUMNS) + "|\n", *lines])


def measured() -> dict[str, str]:
    """Return the measured results by row, as links to their sections."""
    with MEASURED.open(newline="") as file:
        return {line["row"]: f"[{line['result']}](results/{line['place']})" for line in csv.DictReader(file)}


def _line(row: Mapping[str, Any], result: str) -> str:
    choices = [f"`{row[name]}`" for name in ("name", "agent_type", "env_type", "model_type", "memory_type")]
    choices.insert(3, row["game"])
    steps = f"{row['steps']:,}" if "steps" in row else ""
    return f"| {' | '.join([*choices, _capacity(row), steps, result])} |\n"


def _capacity(row: Mapping[str, Any]) -> str:
    """Return the capacity that the row sets, or that its replay list gives to each member."""
    members = row.get("memory.replay_parameters", ())
    if members:
        return ", ".join(f"{member['type']} {member['capacity']:,}" for member in members)
    return f"{row['memory.capacity']:,}" if "memory.capacity" in row else ""


if __name__ == "__main__":
    print(page(), end="")
