"""The inline engine is reproducible and resumes bit for bit (F26, F34, F42)."""

import copy
import json
import re
import shlex
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import main
from core.agents.dqn import DQN
from core.checkpoint import model_file, run_checkpoint
from core.runtime.context import Context
from core.trajectory.ring_buffer import Trajectories
from tests.selection import slow_except
from tests.test_documented_metrics import documented, is_reporter, reporters
from utils.config import validation
from utils.config.command_line import read_options
from utils.factory import AgentsDict, EnginesDict, ProcessesDict
from utils.launch import create_context

SMALL = shlex.split(
    "--engine inline --machine test --rate_limiter.min_replay_size 100 --num_envs_per_actor 4 "
    "--agent.batch_size 16 --evaluator.period 1e9 --evaluator.episodes 1 --evaluator.max_steps 20"
)
CARTPOLE = ("--config", "dqn-cartpole", *SMALL)
CONTROL = (
    *SMALL,
    *shlex.split(
        "--model.hidden 16 --rate_limiter.samples_per_insert 8 --agent.random_exploration_steps 200 "
        "--memory.capacity 5000 --rate_limiter.error_buffer 1000"
    ),
)
REPLAY = json.dumps(
    [
        {"type": "queue", "capacity": 16, "sample_ratio": 0.4, "on_full": "alternating"},
        {"type": "reservoir", "capacity": 20, "sample_ratio": 0.2},
        {"type": "attentive", "capacity": 30, "sample_ratio": 0.2},
        {"type": "elite", "capacity": 10, "sample_ratio": 0.2, "elite_batch_size": 3},
    ]
)
ELITE = json.dumps(
    [
        {"type": "queue", "capacity": 16, "sample_ratio": 0.5},
        {"type": "elite", "capacity": 10, "sample_ratio": 0.5, "elite_batch_size": 3, "lambda_batches": 1000},
    ]
)
CHOICES = ("--game", "tests.choices:Choices-v0")
MIXED = ("--memory.capacity", "10", "--game", "tests.choices:ChooseAndAim-v0")
MASKS = ("--env_type", "tictactoe", "--game", "tictactoe")
UNROLLS = (*SMALL, "--agent.unroll_length", "5", "--agent.batch_size", "10")
RUNS = {  # every agent and every memory
    "shared": (*CARTPOLE, "--memory_type", "shared"),
    "prioritized": (*CARTPOLE, "--memory_type", "prioritized"),
    "rainbow": ("--config", "rainbow-cartpole", *SMALL),
    "on the learner's device": (
        *CARTPOLE,
        *shlex.split(
            "--memory_type prioritized --learner.replay_device learner --learner.updates_per_graph_launch 2 "
            "--actor.num_env_splits 2"
        ),
    ),
    "r2d2": ("--config", "r2d2-cartpole", *SMALL, "--model.hidden", "16", "--model.lstm", "8"),
    "impala with LSTM": ("--config", "impala-cartpole", *UNROLLS, "--model.lstm", "8"),
    "impala with replay": (
        "--config",
        "replay-minatar-breakout",
        *UNROLLS,
        *shlex.split("--env_type catch --game catch --memory.replay_parameters"),
        REPLAY,
        *shlex.split("--agent.relevance kl --agent.policy_cloning_cost 0.01"),
    ),
    "ddpg": (
        "--config",
        "ddpg-pendulum",
        *CONTROL,
        *shlex.split("--agent.noise ornstein-uhlenbeck --model.normalize_observations true"),
    ),
    "d4pg": ("--config", "d4pg-pendulum", *CONTROL, "--memory_type", "prioritized"),
    "td3": ("--config", "td3-pendulum", *CONTROL),
    "sac": ("--config", "sac-pendulum", *CONTROL),
    "ppo": (
        *("--config", "ppo-hopper", *SMALL, "--rate_limiter.min_replay_size", "1", "--agent.batch_size", "4"),
        *("--game", "Pendulum-v1", "--agent.unroll_length", "20", "--agent.minibatches", "2", "--agent.epochs", "2"),
    ),
    "ppo, asynchronous, with LSTM": (
        *("--config", "ppo-cartpole", *UNROLLS, "--memory_type", "queue", "--memory.capacity", "10"),
        *("--model.value_torso", "false", "--model.lstm", "8"),
    ),
    "pqn": (
        *("--config", "pqn-cartpole", *SMALL, "--rate_limiter.min_replay_size", "1", "--agent.batch_size", "4"),
        *("--model.hidden", "16", "--agent.unroll_length", "20", "--agent.minibatches", "2", "--agent.epochs", "2"),
    ),
    "iqn": ("--config", "iqn-cartpole", *SMALL, "--model.hidden", "16"),
    "several choices": ("--config", "impala-cartpole", *UNROLLS, *CHOICES),
    "choices and numbers": ("--config", "ppo-cartpole", *UNROLLS, "--memory_type", "queue", *MIXED),
    "masks": ("--config", "ppo-tictactoe", *SMALL, "--rate_limiter.min_replay_size", "1", "--agent.batch_size", "4"),
    "masks, recurrent": ("--config", "r2d2-cartpole", *SMALL, "--model.hidden", "16", "--model.lstm", "8", *MASKS),
    "joint actions": (*CARTPOLE, "--memory_type", "prioritized", *CHOICES),
    "impact": ("--config", "impact-cartpole", *UNROLLS, "--agent.kl_coefficient", "0.1"),
}


QUICK = ("prioritized", "r2d2", "impala with replay", "sac")


def train(root: Path, *arguments: str) -> Context:
    options = read_options(["--root", str(root), *arguments])
    context, agent = create_context(options)
    engine = EnginesDict["inline"](context, ProcessesDict)
    assert agent.launch(engine) == 0
    return context


def saved(context: Context) -> dict:
    return run_checkpoint.load(context.options.checkpoint_folder)[0]


def metrics(context: Context) -> list[dict]:
    return [
        json.loads(line)["values"] for line in (context.options.log_folder / "metrics.jsonl").read_text().splitlines()
    ]


def differences(first, second, path="") -> list[str]:
    """Return the paths at which two nested states differ in any bit; a NaN equals itself."""
    if isinstance(first, dict):
        assert first.keys() == second.keys(), path
        return [found for key in first for found in differences(first[key], second[key], f"{path}/{key}")]
    if isinstance(first, (list, tuple)):
        return [
            found
            for number, pair in enumerate(zip(first, second, strict=True))
            for found in differences(*pair, f"{path}/{number}")
        ]
    if isinstance(first, torch.Tensor):
        same = (first.dtype, first.shape) == (
            second.dtype,
            second.shape,
        ) and first.numpy().tobytes() == second.numpy().tobytes()
    else:
        same = first == second
    return [] if same else [path]


def test_the_runs_cover_every_agent():
    assert {read_options(words).agent_type for words in RUNS.values()} == set(AgentsDict)


def arguments_of(name: str) -> tuple[str, ...]:
    actors = "1" if name in ("ppo", "pqn", "masks") else "2"  # whose batch is an unroll of every environment
    return *RUNS[name], "--steps", "400", "--num_actors", actors


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a function that trains a run of RUNS once, and returns its options, checkpoint and metrics."""

    @cache
    def run(name):
        context = train(tmp_path_factory.mktemp("run"), *arguments_of(name), "--logger.period", "0.01")
        return context.options, saved(context), metrics(context)

    return run


@pytest.mark.parametrize("name", ["prioritized", "ppo"])
def test_f34_a_seed_determines_the_weights(tmp_path, recorded, name):
    """Replays draw batches by the seed, and PPO has none; test_f26 compares two runs of one seed of every kind."""
    _, first, _ = recorded(name)
    same, other = (saved(train(tmp_path / seed, *arguments_of(name), "--seed", seed)) for seed in ("1", "2"))
    assert not differences(first["agent"], same["agent"])
    assert differences(first["agent"]["model"], other["agent"]["model"])


@pytest.mark.parametrize("name", slow_except(QUICK, RUNS))
def test_a_checkpoint_of_every_agent_is_a_model_to_test(recorded, name):
    options, state, _ = recorded(name)
    weights, _ = model_file.load_weights(options.checkpoint_folder)
    model = options.make_agent(validation.environment_spec(options)).model
    model_file.load_into(model, weights, options.checkpoint_folder)
    assert not differences(state["agent"]["model"], dict(model.state_dict()))


@pytest.mark.parametrize("name", slow_except(QUICK, RUNS))
def test_every_metric_of_a_run_is_documented(recorded, name):
    options, _, lines = recorded(name)
    written = {re.sub(r"_\d+$", "", metric) for values in lines for metric in values}
    assert written and written <= documented()
    members = json.loads(getattr(options.memory, "replay_parameters", "[]"))
    names = {options.agent_type, options.memory_type, *(member["type"] for member in members)}
    columns = reporters()
    assert [metric for metric in written & columns.keys() if not is_reporter(names, columns[metric])] == []


@pytest.mark.parametrize("steps", [500, pytest.param(2_000, marks=pytest.mark.faults)])
@pytest.mark.parametrize("name", slow_except(QUICK, RUNS))
def test_f26_a_resumed_run_equals_an_uninterrupted_run(tmp_path, alone, name, steps):
    exact = (
        *RUNS[name],
        *shlex.split(
            "--learner.checkpoint_replay true --timestamp one --agent.lr_schedule linear "
            "--agent.lr_schedule_updates 3000 --evaluator.steps 50"
        ),
    )
    first = saved(
        train(tmp_path / "straight", *exact, "--learner.checkpoint_steps", str(steps), "--steps", str(2 * steps))
    )
    train(tmp_path / "halves", *exact, "--steps", str(steps))
    torch.manual_seed(5)  # a run that is resumed in another process would not have this one's random state either
    second = saved(train(tmp_path / "halves", "--resume", "test_one", "--steps", str(2 * steps)))
    assert not differences(first["agent"], second["agent"])
    assert not differences(first["clock"], second["clock"])
    assert not differences(first["memory"], second["memory"])
    assert len(evaluations(tmp_path / "straight")) > 3
    assert evaluations(tmp_path / "halves") == evaluations(tmp_path / "straight")
    models = [
        model_file.load_weights(tmp_path / half / "models" / "test_one.pth")[1] for half in ("straight", "halves")
    ]
    of_starts = [model.pop("options") for model in models]  # they differ in when to stop and what to resume
    assert models[0] == models[1] and of_starts[0]["agent"] == of_starts[1]["agent"]


@pytest.mark.slow
def test_a_schedule_of_the_whole_run_lasts_to_its_end(tmp_path, alone):
    """A fifth of a rollout of tictactoe are ends of episodes, which are no agent steps."""
    new = ("--config", "ppo-tictactoe", *SMALL, "--rate_limiter.min_replay_size", "1", "--agent.batch_size", "4")
    new = (*new, "--agent.unroll_length", "20", "--timestamp", "one", "--steps")
    train(tmp_path / "halves", *new, "1000")
    for root, words in (("straight", (*new, "2000")), ("halves", ("--resume", "test_one", "--steps", "2000"))):
        context = train(tmp_path / root, *words)
        start = context.options.agent.learning_rate
        last = saved(context)["agent"]["optimizer"]["optimizer"]["param_groups"][0]["lr"]
        before = context.counters.agent_steps - 80  # the last rollout has 80 steps at most
        assert 0.0 < last <= start and last / start == pytest.approx(1 - before / 2000, abs=0.02), root


def evaluations(root: Path) -> dict[int, dict[str, float]]:
    """Return the evaluator's values by step.

    The evaluation that ends one part of a run is repeated by the next part and must give the same values.
    """
    found: dict[int, dict[str, float]] = {}
    for line in (root / "logs" / "test_one" / "metrics.jsonl").read_text().splitlines():
        values = {name: value for name, value in json.loads(line)["values"].items() if name.startswith("evaluator/")}
        if values:
            assert found.setdefault(json.loads(line)["step"], values) == values
    return found


@pytest.mark.slow
def test_f42_a_resumed_run_repeats_no_other_evaluations(tmp_path, alone):
    arguments = (
        *RUNS["r2d2"],
        *shlex.split(
            "--learner.checkpoint_replay true --timestamp one --evaluator.steps 250 --evaluator.episodes 3 "
            "--evaluator.num_envs 2"
        ),
    )
    train(tmp_path / "straight", *arguments, "--learner.checkpoint_steps", "400", "--steps", "1200")
    train(tmp_path / "parts", *arguments, "--steps", "400")
    for steps in ("800", "1200"):
        train(tmp_path / "parts", "--resume", "test_one", "--steps", steps)
    straight, parts = evaluations(tmp_path / "straight"), evaluations(tmp_path / "parts")
    ends = parts.keys() - straight.keys()
    assert len(straight) >= 4 and ends and all(step % 400 < 10 for step in ends)
    assert {step: parts[step] for step in straight} == straight


def test_samples_per_insert_is_exact(tmp_path):
    context = train(tmp_path, *CARTPOLE, "--steps", "1000", "--rate_limiter.samples_per_insert", "4")
    owed = (context.counters.inserted - 100) * 4 - context.counters.sampled
    assert 0 <= owed < 16


def test_every_update_has_the_rate_of_the_steps_before_it(tmp_path):
    four_rollouts_and_a_part = (*RUNS["ppo"], "--agent.lr_schedule", "linear", "--steps", "330")  # of 80 steps
    context = train(tmp_path, *four_rollouts_and_a_part, "--logger.period", "1e-9", "--logger.steps", "1")
    assert context.counters.updates == 5
    rates = [values["learner/lr"] for values in metrics(context) if "learner/lr" in values]
    assert rates == pytest.approx([3e-4 * (1 - steps / 330) for steps in (0, 80, 160, 240, 320)])


def test_a_replay_that_does_not_fit_leaves_the_run_as_it_was(tmp_path, alone, capfd):
    words = ("--root", str(tmp_path), "--resume", "test_one", "--steps", "1600")
    stored = ("--learner.checkpoint_replay", "true", "--agent.lr_schedule", "constant")
    context = train(tmp_path, *RUNS["impact"], *stored, "--timestamp", "one", "--steps", "1500")
    before, step = saved(context), context.counters.agent_steps
    damaged = copy.deepcopy(before)
    del damaged["memory"]["trajectories"]["action"]
    run_checkpoint.save(context.options.checkpoint_folder, damaged, step + 1, keep=2)
    assert main.main(words) == 3
    assert "stored replay does not fit" in (told := capfd.readouterr().err)
    assert "start a new one, or leave the options as they were" in told
    run_checkpoint.save(context.options.checkpoint_folder, before, step, keep=2)
    assert main.main(words) == 0


def test_a_new_run_can_start_from_weights_alone(tmp_path):
    first = train(tmp_path, *CARTPOLE, "--steps", "400", "--timestamp", "one")
    weights, _ = model_file.load_weights(first.options.model_path)
    second = train(
        tmp_path, *CARTPOLE, "--seconds", "0.001", "--timestamp", "two", "--model_file", str(first.options.model_path)
    )
    assert second.counters.updates == 0
    assert all(np.array_equal(weights[name], value) for name, value in saved(second)["agent"]["model"].items())


def test_every_checkpoint_can_be_tested_and_started_from(tmp_path, capsys):
    saving = ("--learner.checkpoint_steps", "300", "--learner.checkpoint_keep", "9")
    train(tmp_path, *CARTPOLE, "--steps", "800", "--timestamp", "one", *saving)
    folders = sorted((tmp_path / "models" / "test_one_checkpoints").glob("step_*"))
    assert len(folders) > 2
    for folder in folders:
        words = (*CARTPOLE, "--mode", "2", "--episodes", "3", "--model_file", f"{folder.parent.name}/{folder.name}")
        assert main.main(["--root", str(tmp_path), *words]) == 0
        report = json.loads((tmp_path / "models" / f"test_one_{folder.name}_test.json").read_text())
        assert (report["model"]["checkpoint"], report["model"]["signature"]) == (folder.name, "test_one")
        assert len(report["returns"]) == 3 and report["summary"]["solved_share"] == 0
        assert f"{folder.name} on CartPole-v1" in capsys.readouterr().out
    assert folders == sorted(path for path in folders[0].parent.glob("step_*"))  # testing has added nothing among them
    second = train(tmp_path, *CARTPOLE, "--seconds", "0.001", "--timestamp", "two", "--model_file", str(folders[1]))
    assert not differences(
        saved(second)["agent"]["model"], run_checkpoint.read(folders[1], ["agent"])["agent"]["model"]
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--resume", "test_one", "--steps", "250"),
        (*CARTPOLE, "--timestamp", "two", "--seconds", "0.001", "--model_file", "test_one_checkpoints"),
        (*CARTPOLE, "--mode", "2", "--episodes", "1", "--model_file", "test_one_checkpoints"),
    ],
    ids=["resume", "start", "test"],
)
def test_a_start_hashes_each_file_of_a_checkpoint_once(tmp_path, monkeypatch, alone, words):
    saving = shlex.split("--learner.checkpoint_replay true --learner.checkpoint_steps 100 --learner.checkpoint_keep 9")
    train(tmp_path, *CARTPOLE, "--timestamp", "one", "--steps", "200", *saving)
    newest = max((tmp_path / "models" / "test_one_checkpoints").glob("step_*"))
    expected, hashed, file_sha256 = sorted(newest.glob("*.pt")), [], run_checkpoint.file_sha256
    monkeypatch.setattr(run_checkpoint, "file_sha256", lambda path: hashed.append(path) or file_sha256(path))
    assert main.main(["--root", str(tmp_path), *words]) == 0
    assert [path.stem for path in expected] == ["agent", "clock", "learner", "memory", "metadata"]
    assert sorted(hashed) == expected


def test_weights_alone_initialise_the_learners_target(tmp_path, monkeypatch):
    first = train(tmp_path, *CARTPOLE, "--steps", "400", "--timestamp", "one")
    weights, _ = model_file.load_weights(first.options.model_path)
    targets, learn = {}, DQN.learn

    def noted(agent, batch):
        targets.setdefault(agent, copy.deepcopy(agent.target.state_dict()))
        return learn(agent, batch)

    monkeypatch.setattr(DQN, "learn", noted)
    train(tmp_path, *CARTPOLE, "--steps", "150", "--timestamp", "two", "--model_file", str(first.options.model_path))
    (target,) = targets.values()
    assert not differences(dict(target), weights)


def test_a_resumed_run_keeps_the_better_model_of_the_old_one(tmp_path, alone):
    first = train(tmp_path, *CARTPOLE, "--steps", "200", "--timestamp", "one").options
    weights, metadata = model_file.load_weights(first.model_path)
    model_file.save_weights(first.model_path, weights, {**metadata, "score": 1e9})
    second = train(tmp_path, "--resume", "test_one", "--steps", "300")
    kept, metadata = model_file.load_weights(first.model_path)
    assert second.counters.scores[0] < second.counters.scores[1] == metadata["score"] == 1e9 and not differences(
        kept, weights
    )


SCHEDULES = {  # a run, a statistic of the learner, and its expected value after so many updates
    "beta": (
        (*CARTPOLE, "--memory_type", "prioritized", "--memory.beta_updates", "1000"),
        "beta",
        lambda updates: 0.4 + 0.6 * updates / 1000,
    ),
    "beta on the learner's device": (
        (*RUNS["on the learner's device"], "--memory.beta_updates", "1000"),
        "beta",
        lambda updates: 0.4 + 0.6 * updates / 1000,
    ),
    "elite's lambda": (
        (*RUNS["impala with replay"], "--memory.replay_parameters", ELITE),
        "candidate_multiplier",
        lambda updates: 6 - 5 * updates / (2 * 1000),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_by_updates_continue_without_a_stored_replay(tmp_path, alone, monkeypatch, name):
    arguments, reported, after = SCHEDULES[name]
    first = train(tmp_path, *arguments, "--logger.period", "1e-9", "--steps", "300", "--timestamp", "one")
    found = []
    monkeypatch.setattr(
        Context, "report", lambda context, role, index, values: found.append((context.counters.updates, values))
    )
    train(tmp_path, "--resume", "test_one", "--steps", "500")
    found = [(updates, values[reported]) for updates, values in found if reported in values]
    assert 0 < first.counters.updates < found[0][0] < found[-1][0] < 1000
    assert [value for _, value in found] == pytest.approx([after(updates) for updates, _ in found])


def test_a_replay_too_large_to_copy_fails_one_checkpoint(tmp_path, monkeypatch, capsys):
    copied, state_dict = [], Trajectories.state_dict

    def limited(trajectories):
        copied.append(trajectories)
        if len(copied) == 1:
            raise MemoryError("no room for the copies")
        return state_dict(trajectories)

    monkeypatch.setattr(Trajectories, "state_dict", limited)
    context = train(
        tmp_path, *CARTPOLE, *shlex.split("--steps 300 --learner.checkpoint_replay true --learner.checkpoint_steps 200")
    )
    assert len(copied) == 2 and capsys.readouterr().err.count("checkpoint not written, an older one stays") == 1
    assert sum(row.get("learner/checkpoint_errors", 0) for row in metrics(context)) == 1
    assert len([*context.options.checkpoint_folder.glob("step_*")]) == 1
    assert "memory" in saved(context)


def test_what_happened_last_is_reported_before_the_period_ends(tmp_path):
    context = train(tmp_path, *CARTPOLE, "--timestamp", "short", "--logger.period", "1e6", "--updates", "20")
    for name in ("learner/loss", "actor/epsilon", "actor/policy_lag"):
        reported = [values[name] for values in metrics(context) if name in values]
        assert len(reported) == 1 and np.isfinite(reported).all()
    assert context.counters.updates == 20


def test_actors_and_learner_report_every_logger_steps(tmp_path):
    context = train(tmp_path, *CARTPOLE, "--steps", "450", "--logger.period", "1e6", "--logger.steps", "100")
    lines = [values for values in metrics(context) if "global/agent_steps" in values]
    assert len(lines) == 5 and all("actor/epsilon" in values for values in lines)
    assert all("learner/loss" in values for values in lines[1:])


@pytest.mark.parametrize("agent", ["ddpg", "sac"])
def test_scalar_observations_and_actions_can_be_learnt_from(root, agent):
    context = train(
        root,
        "--config",
        f"{agent}-pendulum",
        *CONTROL,
        *shlex.split("--game tests.reliability.faults:Scalar-v0 --updates 20"),
    )
    assert context.counters.updates >= 20


@pytest.mark.parametrize("steps", [40, 400])
def test_a_run_that_ends_before_its_first_update_says_so(steps, start_here, tmp_path):
    """Four environments make unrolls of 10 steps, of which a batch has eight."""
    words = "--config", "impala-cartpole", *SMALL, "--agent.batch_size", "8", "--agent.unroll_length", "10"
    program = start_here(tmp_path, *words, "--rate_limiter.min_replay_size", "1", "--steps", str(steps))
    assert program.returncode == 0 and ("no update was made" in program.stderr) == (steps == 40), program.stderr
