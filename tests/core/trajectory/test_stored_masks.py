"""Masks reach the learner with their steps, by every memory, and cost nothing where there are none."""

import pytest
import torch

from core.specs import ArraySpec, Discrete, EnvSpec, MultiDiscrete
from core.trajectory.ring_buffer import Layout
from core.types import ACTION_MASK
from tests.reliability.test_inline import ELITE, MASKS, REPLAY, RUNS, UNROLLS, train
from utils.factory import AgentsDict

SPLITS = ("--actor.num_env_splits", "2")
RUNS_OF_MEMORIES = {
    "uniform": (*RUNS["shared"], *MASKS, *SPLITS),
    "prioritised": (*RUNS["rainbow"], *MASKS, "--memory_type", "prioritized", "--memory.capacity", "300"),
    "on the learner's device": (*RUNS["on the learner's device"], *MASKS),
    "sequences": (*RUNS["r2d2"], *MASKS, *SPLITS),
    "queue": (*RUNS["impala with LSTM"], *MASKS, *SPLITS),
    "mixed": ("--config", "impala-cartpole", *UNROLLS, *MASKS, "--memory_type", "mixed", "--memory.replay_parameters"),
    "circular": (*RUNS["impact"], *MASKS),
    "rollouts": RUNS["masks"],
    "rollouts of values": (*RUNS["pqn"], *MASKS),
}


def empty_cells(observations):
    """Return the legal actions by tic-tac-toe's observations [..., 18]."""
    own, their = observations.chunk(2, -1)
    empty = (own + their) == 0
    return empty | ~empty.any(-1, keepdim=True)  # a full board ends the game, and all actions mean as little


@pytest.mark.parametrize("name", [*RUNS_OF_MEMORIES, "elite"])
def test_masks_are_those_of_the_observations(tmp_path, monkeypatch, name):
    replay = {"mixed": (REPLAY,), "elite": (ELITE,)}.get(name, ())
    words = (*RUNS_OF_MEMORIES["mixed" if replay else name], *replay, "--steps", "400")
    agent_class, seen = AgentsDict[_agent_of(words)], []
    learn = agent_class.learn

    def checked(agent, batch):
        window, length = batch.window, len(batch.window.observations)
        if len(window.observations) == len(window.lasts):
            seen.append(length)
            assert torch.equal(window.extras[ACTION_MASK].cpu(), empty_cells(window.observations).cpu())
        else:
            seen.append(length)
            transitions = agent.learning_inputs(window)
            for found, observation in zip(
                (transitions.legal, transitions.next_legal), window.observations, strict=True
            ):
                assert torch.equal(found.cpu(), empty_cells(observation).cpu())
        stored = window.extras[ACTION_MASK][0].gather(1, window.actions[0, :, None])[:, 0]
        assert (stored | window.lasts[0]).all()  # no illegal action was taken
        return learn(agent, batch)

    monkeypatch.setattr(agent_class, "learn", checked)
    context = train(tmp_path, *words)
    assert len(seen) > 3 or (context.options.memory_type == "rollouts" and seen)


def _agent_of(words):
    return words[words.index("--config") + 1].partition("-")[0]


def test_steps_without_masks_have_no_field_for_them():
    plain = EnvSpec("numbers", ArraySpec((1,), "float32"), 0, MultiDiscrete((2, 3)))
    sizes = {"capacity": 100, "num_actors": 1, "num_envs": 2, "chunk_length": 4, "with_priority": False}
    layouts = [
        Layout.of(EnvSpec(*(plain.name, plain.frame, 0, plain.action), has_action_mask=masked), {}, **sizes)
        for masked in (False, True)
    ]
    assert layouts[0].fields.keys() == {"frame", "first", "last", "action", "reward", "discount"}
    assert layouts[1].fields[ACTION_MASK] == ArraySpec((5,), "bool") and layouts[1].extras == (ACTION_MASK,)
    sizes = [sum(spec.nbytes for spec in layout.arrays().values()) for layout in layouts]
    assert sizes[1] - sizes[0] == 5 * 2 * layouts[0].ring_length
    assert EnvSpec("numbers", plain.frame, 0, Discrete(4)).action_mask is None
