"""Every replay strategy, loss and recurrent network learns a small task within seconds on the inline engine."""

import json
import shlex
from collections.abc import Iterable
from typing import Any

import pytest

from utils.config.command_line import read_options
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import create_context

CATCH = shlex.split(
    "--config impala-minatar-breakout --env_type catch --game catch --agent.unroll_length 10 "
    "--agent.batch_size 8 --agent.learning_rate 2e-3 --target_score 0.9 --steps 80000 "
    "--evaluator.steps 4000 --evaluator.episodes 40 --evaluator.num_envs 40"
)
QUEUE = {"type": "queue", "capacity": 8}
COMPARED = {"lambda_batch_multiplier": 3, "lambda_batches": 100}
ELITE = {"type": "custom", "sample_strategy": "elite_sampling", **COMPARED}
RULES = {
    "standard": {"type": "standard"},
    "reservoir": {"type": "reservoir"},
    "attentive": {"type": "attentive", **COMPARED},
    **{f"elite strategy{number}": {**ELITE, "elite_sampling_strategy": f"strategy{number}"} for number in (1, 2, 3, 4)},
    "elite cosine": {**ELITE, "dist_function": "cos_dist"},
    "elite kl": {**ELITE, "dist_function": "kl_div"},
    "elite insertion": {**ELITE, "insert_strategy": "elite_insertion", "elite_batch_size": 10},
}
# Beside the standard replay of LASER, the reservoir of CLEAR, and strategy 3, which half precision has.
UNLIKE = ("attentive", "elite insertion")


def best_score(tmp_path, *words: str) -> float:
    context, agent = create_context(read_options([*words, "--root", str(tmp_path), "--engine", "inline"]))
    assert agent.launch(EnginesDict["inline"](context, ProcessesDict)) == 0
    assert context.counters.scores is not None
    return context.counters.scores[1]


def marked(slow: Iterable[str], others: Iterable[str]) -> list[Any]:
    """Return names, of which some learn in `make test-all` and the others in `make learn`."""
    return [
        *(pytest.param(each, marks=pytest.mark.slow) for each in slow),
        *(pytest.param(each, marks=pytest.mark.learn) for each in others),
    ]


def mixed(share: float, **rule) -> tuple[str, ...]:
    replay = [{**QUEUE, "sample_ratio": 1 - share}, {"capacity": 100, "sample_ratio": share, **rule}]
    return "--memory_type", "mixed", "--memory.replay_parameters", json.dumps(replay)


def test_v_trace_learns_catch_from_a_queue(tmp_path):
    assert best_score(tmp_path, *CATCH) >= 0.9


@pytest.mark.parametrize("name", marked(UNLIKE, [name for name in RULES if name not in UNLIKE]))
def test_v_trace_learns_catch_with_every_replay_strategy(tmp_path, name):
    assert best_score(tmp_path, *CATCH, *mixed(0.5, **RULES[name])) >= 0.9


@pytest.mark.slow
def test_features_may_be_stored_at_half_precision(tmp_path):
    words = (*CATCH, *mixed(0.5, **RULES["elite strategy3"]))
    layouts = [
        create_context(read_options([*words, "--root", str(tmp_path / kind), "--memory.feature_dtype", kind]))[0]
        .memories[0]
        .layout
        for kind in ("float32", "float16")
    ]
    assert [layout.fields["features"].dtype for layout in layouts] == ["float32", "float16"]
    assert layouts[0].nbytes - layouts[1].nbytes >= 2 * 128 * layouts[0].num_slots
    assert best_score(tmp_path, *words, "--memory.feature_dtype", "float16") >= 0.9


@pytest.mark.parametrize("relevance", marked(["implied"], ["kl"]))
def test_laser_learns_catch_from_three_quarters_replay(tmp_path, relevance):
    assert best_score(tmp_path, *CATCH, *mixed(0.75, type="standard"), "--agent.relevance", relevance) >= 0.9


@pytest.mark.slow
def test_clear_learns_catch_with_policy_and_value_cloning(tmp_path):
    assert (
        best_score(
            tmp_path,
            *CATCH,
            *mixed(0.5, type="reservoir"),
            *shlex.split("--agent.policy_cloning_cost 0.01 --agent.value_cloning_cost 0.005"),
        )
        >= 0.9
    )


@pytest.mark.slow
def test_impact_learns_catch_from_batches_used_twice(tmp_path):
    """The divergence from its target is part of the loss here."""
    words = "--agent_type", "impact", "--memory_type", "circular", "--agent.kl_coefficient", "0.5"
    assert best_score(tmp_path, *CATCH, *words) >= 0.9


CATCH_BY_VALUES = shlex.split(
    "--env_type catch --game catch --agent.learning_rate 1e-3 --agent.optimizer_eps 1e-6 "
    "--agent.target_update_period 100 --rate_limiter.min_replay_size 500 --memory.capacity 10000 "
    "--target_score 0.9 --steps 15000 --evaluator.steps 1000 --evaluator.episodes 40 "
    "--evaluator.num_envs 40"
)


@pytest.mark.parametrize("distribution", marked(["categorical"], ["quantile"]))
def test_rainbow_learns_catch_with_either_distribution(tmp_path, distribution):
    """Epsilon adds random actions: noise alone may fade before the paddle has caught a ball in every column."""
    words = "--config", "rainbow-minatar-breakout", *CATCH_BY_VALUES, "--agent.v_min", "-1", "--agent.v_max", "1"
    epsilon = "--agent.exploration_epsilon_start", "0.05", "--agent.exploration_epsilon_end", "0.05"
    assert best_score(tmp_path, *words, *epsilon, "--agent.distribution", distribution) >= 0.9


@pytest.mark.parametrize("agent", marked(["munchausen-iqn"], ["iqn", "munchausen-dqn"]))
def test_iqn_and_munchausen_learn_catch(tmp_path, agent):
    words = "--config", f"{agent}-minatar-breakout", *CATCH_BY_VALUES, "--agent.exploration_epsilon_steps", "3000"
    assert best_score(tmp_path, *words, "--agent.n_step", "3") >= 0.9


@pytest.mark.slow
def test_pqn_learns_catch(tmp_path):
    words = ("--config", "pqn-minatar-breakout", *CATCH_BY_VALUES[:4], "--num_envs_per_actor", "16")
    words += ("--agent.minibatches", "8", "--agent.exploration_epsilon_steps", "10000", "--target_score", "0.9")
    evaluations = ("--evaluator.steps", "2000", "--evaluator.episodes", "40", "--evaluator.num_envs", "40")
    assert best_score(tmp_path, *words, *evaluations, "--steps", "40000") >= 0.9


@pytest.mark.slow
def test_a_cue_is_remembered_with_an_lstm(tmp_path):
    """Without memory no policy can do more than guess, as tests/core/envs/test_small_tasks.py proves."""
    words = shlex.split(
        "--config impala-lstm-recall --env.delay 3 --agent.unroll_length 10 --agent.learning_rate 3e-3 "
        "--target_score 0.9 --evaluator.steps 8000 --evaluator.episodes 64 --evaluator.num_envs 64"
    )
    assert best_score(tmp_path, *words, "--steps", "160000") >= 0.9


@pytest.mark.parametrize("agent", marked(["ppo"], ["dqn", "impala", "impact"]))
def test_several_choices_are_learnt_at_once(tmp_path, agent):
    """Random play scores 2.3, and every choice right 5."""
    words = (
        "--config",
        f"{agent}-cartpole",
        *shlex.split("--game tests.choices:Choices-v0 --target_score 4.8 --agent.lr_schedule constant"),
        *(("--agent.learning_rate", "1e-3") if agent == "ppo" else ()),  # at its row's rate, PPO needs twice the time
    )
    evaluations = ("--evaluator.steps", "2000", "--evaluator.episodes", "50", "--evaluator.num_envs", "50")
    assert best_score(tmp_path, *words, *evaluations, "--steps", "100000") >= 4.8


@pytest.mark.parametrize("agent", marked(["ppo"], ["impala", "impact"]))
def test_a_choice_and_a_number_are_learnt_at_once(tmp_path, agent):
    """Both right score 5; the right choice with the best constant number 1.9, the right number with any choice 1.7."""
    words = ("--config", f"{agent}-cartpole", "--game", "tests.choices:ChooseAndAim-v0", "--target_score", "3.5")
    words += ("--agent.entropy_cost", "0.001", "--agent.evaluation", "greedy")
    evaluations = ("--evaluator.steps", "2000", "--evaluator.episodes", "50", "--evaluator.num_envs", "50")
    assert best_score(tmp_path, *words, *evaluations, "--steps", "150000") >= 3.5


@pytest.mark.parametrize("row", marked(["dqn-tictactoe", "ppo-tictactoe"], ["r2d2-cartpole"]))
def test_tic_tac_toe_is_learnt_with_masks(tmp_path, row):
    """Random play scores 0."""
    words = ("--config", row, "--env_type", "tictactoe", "--game", "tictactoe", "--target_score", "0.7")
    evaluations = ("--evaluator.steps", "5000", "--evaluator.episodes", "200", "--evaluator.num_envs", "50")
    assert best_score(tmp_path, *words, *evaluations, "--steps", "80000") >= 0.7


@pytest.mark.slow
def test_a_cue_is_remembered_by_r2d2(tmp_path):
    words = shlex.split("--config r2d2-recall --evaluator.steps 4000 --evaluator.episodes 64 --evaluator.num_envs 64")
    assert best_score(tmp_path, *words, "--target_score", "0.9", "--steps", "40000") >= 0.9
