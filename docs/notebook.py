# %% [markdown]
# Train, evaluate and export from Python. The file is a notebook's cells, and also runs as a script. A script needs
# no `if __name__ == "__main__"`, because `train` runs `main.py` in a subprocess. An interrupt saves the run's state,
# and resume="newest" continues the run.

# %% Train a row of CONFIGS; this takes some seconds
from pathlib import Path

import gymnasium as gym
import numpy as np

from utils.api import load, train

run = train("dqn-cartpole", {"evaluator.steps": 2_000, "evaluator.episodes": 5}, steps=4_000, seed=1, root="runs")
print(run.signature, run.log_folder)

# %% Read the evaluations as arrays
scores = run.scores
for steps, value in zip(scores.steps, scores.values):
    print(f"{steps:,.0f} agent steps: mean return {value:.1f}")

# %% Play whole episodes with the best model in this process
policy = run.load()  # The same as load("runs/models/<signature>.pth")
results = policy.evaluate(episodes=5)
print(f"mean return {results.returns.mean():.1f} of {len(results.returns)} episodes")

# %% Act in an environment of your own, on one observation or on several
env = gym.make("CartPole-v1")
observation, _ = env.reset(seed=1)
state, ended, total = None, False, 0.0
while not ended:
    action, state = policy.act(observation, state)
    observation, reward, terminated, truncated, _ = env.step(action)
    total, ended = total + float(reward), terminated or truncated
print(f"an episode of one's own loop: {total:.0f}")
actions, _ = policy.act(np.zeros((8, 4)))
print("actions for eight observations:", actions)

# %% Export the network as ONNX and compare it with torch, like python -m utils.export runs/models/<signature>.pth
from utils.export import export  # noqa: E402  Needs pip install -e ".[onnx]".

onnx_file = Path(run.model_path).with_suffix(".onnx")
network = export(load(run.model_path), onnx_file)
print(onnx_file.name, network.inputs, network.outputs)
