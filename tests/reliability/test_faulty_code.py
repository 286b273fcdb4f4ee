"""Environments and agents that misbehave in the real program (F11, F14-F19, F32, F39, F46, F47, F50, F53, F55)."""

import json
import math
import re
import shlex

import pytest

from core.checkpoint import run_checkpoint
from tests.reliability.program import SLOW, Program, start

FAULTY = shlex.split(
    "--config dqn-cartpole --env_type gym --game tests.reliability.faults:Faulty-v0 --timestamp one "
    "--evaluator.episodes 1 --evaluator.max_steps 30 --rate_limiter.min_replay_size 100 "
    "--logger.period 0.5"
)
INLINE = ("--engine", "inline", "--num_envs_per_actor", "2", "--agent.batch_size", "16")
AGENTS = "tests.reliability.faults:"


def faults(*listed: dict) -> dict[str, str]:
    return {"FAULTS": json.dumps(listed)}


def values(root, name):
    lines = [json.loads(line) for line in (root / "logs" / "test_one" / "metrics.jsonl").read_text().splitlines()]
    return [line["values"][name] for line in lines if name in line["values"]]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_f14_f15_f32_failing_actors_are_replaced_no_step_is_torn(tmp_path):
    """Actor 1 fails when made, at a reset and at step 1000; actor 0 hangs in environment 1; then the run goes on."""
    listed = [
        {"kind": kind, "where": f"actor {actor}", "env_ind": 1, "at": at, "once": str(tmp_path / kind)}
        for kind, actor, at in (("init", 1, 0), ("reset", 1, 0), ("raise", 1, 1_000), ("hang", 0, 150))
    ]
    silence = "s (supervisor.heartbeat_timeout), within environment 1"
    messages = ("the simulator has no licence", "the simulator lost its level", "the simulator crashed", silence)
    words = (
        *shlex.split(f"--num_actors 2 --num_envs_per_actor 2 --agent_type {AGENTS}Watchful"),
        *shlex.split(
            "--actor.chunk_length 32 --memory.capacity 2000 --supervisor.heartbeat_timeout 10 "
            "--supervisor.max_restarts 50 --rate_limiter.samples_per_insert 0.5 --steps 100000000 "
            "--evaluator.period 1e9"
        ),
    )
    with Program(tmp_path, *FAULTY, *words, environment=faults(*listed)) as program:
        program.until(
            lambda: (program.children(), all(message in program.output for message in messages))[1],
            150,
            "all four messages",
        )
        program.until_training(program.agent_steps() + 1_000)
        program.process.send_signal(2)
        assert program.until_ended(15 * SLOW) == 130 and not program.leftovers()
    told = program.output
    for message, note in zip(
        messages, ("", "in reset of environment 1, at its step 0", "in step of environment 1, at its step 1000")
    ):
        said = next((line for line in told.splitlines() if line.startswith("supervisor") and message in line), told)
        assert said.count("actor 1 (pid") == 1 and note in said and "actor 1, its environments seeded with" in said
        assert told.count(f"RuntimeError: {message}\n") == 1  # the traceback is printed once


@pytest.mark.slow
def test_f15_the_run_ends_if_every_actor_fails_at_its_start(tmp_path):
    with Program(
        tmp_path, *FAULTY, "--num_actors", "2", environment=faults({"kind": "init", "where": "actor"})
    ) as program:
        assert program.until_ended(100) == 4 and not program.leftovers()
    assert program.output.count("failed: RuntimeError: the simulator has no licence") <= 3
    assert program.output.count("restarted (") <= 1


def test_f15_an_environment_that_cannot_be_made_is_refused(start_here, tmp_path):
    program = start_here(tmp_path, *FAULTY, environment=faults({"kind": "init"}))
    assert program.returncode == 2 and len(program.stderr.splitlines()) == 1
    assert "RuntimeError: the simulator has no licence" in program.stderr and "faults.py, line" in program.stderr


LEAVES = "the environment called sys.exit(0)"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("exit", LEAVES),
        *(
            pytest.param(kind, f"the environment raised {message}", marks=pytest.mark.faults)
            for kind, message in (
                ("unreadable", "Unreadable: (its __str__ raises ValueError)"),
                ("import", "ImportError: no module of levels"),
            )
        ),
    ],
)
def test_f46_an_environment_that_would_end_the_process_is_reported(start_here, tmp_path, kind, message):
    program = start_here(tmp_path, *FAULTY, *INLINE, environment=faults({"kind": kind, "at": 50}))
    assert program.returncode == 4, program.stderr
    assert message in program.stderr and "in step of environment 0, at its step 50" in program.stderr


def test_f46_an_environment_that_exits_when_made_is_refused(start_here, tmp_path):
    program = start_here(tmp_path, *FAULTY, "--check", environment=faults({"kind": "exit when made"}))
    assert program.returncode == 2 and len(program.stderr.splitlines()) == 1
    assert "its constructor called sys.exit(0)" in program.stderr and "faults.py, line" in program.stderr


def test_f47_an_observation_far_outside_its_box_is_reported(start_here, tmp_path):
    program = start_here(
        tmp_path, *FAULTY, *INLINE, "--env.kwargs", '{"bound": 100000}', environment=faults({"kind": "far", "at": 50})
    )
    assert program.returncode == 4 and "agent.learning_rate" not in program.stderr, program.stderr
    assert (
        "observation of environment 0 at step 50 is" in program.stderr
        and "expected a value near -100000.0 .. 100000.0" in program.stderr
    )


@pytest.mark.faults
def test_f46_sys_exit_of_an_environment_is_no_normal_end(tmp_path):
    words = (*FAULTY, "--supervisor.max_restarts", "1", "--evaluator.period", "1")
    for number, role in enumerate(("actor", "evaluator")):
        with Program(tmp_path / role, *words, environment=faults({"kind": "exit", "where": role, "at": 10})) as program:
            assert program.until_ended(100) == 4 and not program.leftovers(), number
        assert f"{role} 0 was restarted 1 times" in program.output and LEAVES in program.output
    trained = start(tmp_path, *FAULTY, *INLINE, "--updates", "2")
    assert trained.returncode == 0, trained.stderr
    tested = start(
        tmp_path, *FAULTY[:2], "--mode", "2", "--timestamp", "one", environment=faults({"kind": "exit", "at": 10})
    )
    assert tested.returncode == 4 and LEAVES in tested.stderr


@pytest.mark.parametrize(
    ("game", "kind", "message"),
    [
        ("gym", "nan", "observation of environment 0 at step 50 is"),
        ("gym", "four values", 'set legacy="v21"'),
        *(
            pytest.param("gym", kind, message, marks=pytest.mark.faults)
            for kind, message in (
                ("infinite reward", "reward of environment 0 at step 50 is inf"),
                ("wrong dtype", "observation of environment 0 at step 50 is"),
                ("wrong shape", "observation of environment 0 at step 50 is"),
                ("nothing", "step of environment 0 returned None at step 50"),
            )
        ),
        ("own", "nothing", "first of catch at step 1 is None"),
    ],
)
def test_f16_f17_an_invalid_step_names_field_and_environment(start_here, tmp_path, game, kind, message):
    own = shlex.split(f"--config dqn-minatar-breakout --env_type {AGENTS}Careless --game catch --engine inline")
    fault = {"kind": kind, "at": 50} if game == "gym" else {"kind": kind}
    program = start_here(tmp_path, *(own if game == "own" else (*FAULTY, *INLINE)), environment=faults(fault))
    assert program.returncode == 4 and message in program.stderr
    assert "actor 0, its environments seeded with" in program.stderr


@pytest.mark.parametrize(
    "words",
    [
        (),
        pytest.param(
            ("--memory_type", "prioritized", "--memory.alpha", "0", "--learner.compile", "yes"),
            marks=pytest.mark.faults,
        ),
    ],
)
def test_f18_one_non_finite_loss_is_skipped_and_counted(start_here, tmp_path, words):
    fault = {"kind": "huge reward", "at": 100, "once": str(tmp_path / "once")}
    program = start_here(
        tmp_path,
        *FAULTY,
        *INLINE,
        *shlex.split(
            "--agent.loss squared --agent.batch_size 64 --updates 80 --memory.capacity 300 --logger.period 0.01"
        ),
        *words,
        environment=faults(fault),
    )
    assert program.returncode == 0, program.stderr
    assert values(tmp_path, "learner/nonfinite_updates")[-1] >= 1 and math.isfinite(
        values(tmp_path, "learner/loss")[-1]
    )


@pytest.mark.parametrize("words", [(), ("--learner.replay_device", "learner", "--logger.period", "1000")])
def test_f18_repeated_non_finite_losses_end_the_run_with_4(start_here, tmp_path, words):
    words += ("--agent.loss", "squared", "--learner.checkpoint_steps", "100", "--learner.max_nonfinite_updates", "5")
    program = start_here(tmp_path, *FAULTY, *INLINE, *words, environment=faults({"kind": "huge reward", "at": 30}))
    assert (
        program.returncode == 4
        and "not finite in 5 updates in a row" in program.stderr
        and "Smaller rewards, agent.learning_rate or" in program.stderr
    )
    state, _ = run_checkpoint.load(tmp_path / "models" / "test_one_checkpoints")
    assert all(tensor.isfinite().all() for tensor in state["agent"]["model"].values())


@pytest.mark.slow
def test_f19_missing_priorities_are_refused_by_a_replay_on_the_device(start_here, tmp_path):
    words = ("--memory_type", "prioritized", "--agent_type", AGENTS + "BadPriorities", "--updates", "20")
    environment = faults({"kind": "no priorities"})
    device = ("--learner.replay_device", "learner")
    program = start_here(tmp_path, *FAULTY, *INLINE, *words, *device, environment=environment)
    assert program.returncode == 4 and "ValueError: priorities" in program.stderr, program.stderr


@pytest.mark.parametrize("kind", ["nan", "no", "zero"])
def test_f19_nan_and_missing_priorities_are_refused_and_zero_is_accepted(start_here, tmp_path, kind):
    words = ("--memory_type", "prioritized", "--agent_type", AGENTS + "BadPriorities", "--updates", "20")
    program = start_here(tmp_path, *FAULTY, *INLINE, *words, environment=faults({"kind": f"{kind} priorities"}))
    if kind == "zero":
        assert program.returncode == 0, program.stderr
    else:
        assert program.returncode == 4 and "ValueError: priorities" in program.stderr, program.stderr


def test_f39_an_endless_game_is_truncated_at_the_step_cap(start_here, tmp_path):
    imageio = pytest.importorskip("imageio")
    words = (
        *shlex.split(f"--config dqn-minatar-breakout --env_type {AGENTS}Endless"),
        *shlex.split("--game catch --evaluator.max_steps 40 --evaluator.episodes 1 --rate_limiter.min_replay_size 100"),
    )
    trained = start_here(
        tmp_path, *words, "--engine", "inline", "--timestamp", "one", "--updates", "2", "--num_envs_per_actor", "2"
    )
    assert trained.returncode == 0, trained.stderr
    tested = start_here(tmp_path, *words, "--mode", "2", "--timestamp", "one", "--episodes", "3", "--record")
    assert tested.returncode == 0, tested.stderr
    report = json.loads((tmp_path / "models" / "test_one_test.json").read_text())
    assert report["lengths"] == [40] * 3 and report["truncated"] == [True] * 3 and len(report["returns"]) == 3
    assert all(abs(score) <= 5 and score == int(score) for score in report["returns"])
    with imageio.get_reader(tmp_path / "models" / "test_one_test.mp4") as video:
        assert len(list(video.iter_data())) == 3 * (1 + 40)


@pytest.mark.slow
def test_f11_a_learner_that_dies_while_saving_ends_the_run(tmp_path):
    saving = tmp_path / "saving"
    words = (
        *shlex.split(
            f"--config dqn-minatar-breakout --env_type {AGENTS}Endless --game catch --agent_type {AGENTS}NeverSaved"
        ),
        *shlex.split("--steps 300 --rate_limiter.min_replay_size 100 --timestamp one --evaluator.max_steps 1000000000"),
    )
    with Program(
        tmp_path, *words, environment=faults({"kind": "save", "where": "learner 0", "once": str(saving)})
    ) as program:
        program.until(saving.exists, 60, "the last checkpoint")
        program.kill("learner 0")
        assert program.until_ended(15 * SLOW) == 4 and not program.leftovers()
        assert (
            "was killed by signal 9" in program.output
            and "this run has no checkpoint (one is due every 60 s" in program.output
        )


@pytest.mark.slow
def test_f15_an_environment_failing_after_a_restart_is_retried(tmp_path):
    once = tmp_path / "once"
    once.touch()  # so that the fault is not due at the first start
    with Program(
        tmp_path,
        *FAULTY,
        *shlex.split("--num_actors 1 --steps 100000000"),
        environment=faults({"kind": "init", "where": "actor 0", "once": str(once)}),
    ) as program:
        program.until_training(200)
        once.unlink()
        program.kill("actor 0")
        program.until(lambda: "actor 0 restarted (2 of" in program.output, 30 * SLOW, "the third life")
        assert "the simulator has no licence" in program.output
        program.until_training(program.agent_steps() + 500)
        program.process.send_signal(2)
        assert program.until_ended(15 * SLOW) == 130 and not program.leftovers()


@pytest.mark.faults
def test_f53_a_process_that_exits_with_0_is_replaced(tmp_path):
    leaving = [
        {"kind": "leave", "where": where, "at": at, "once": str(tmp_path / where)}
        for where, at in (("actor", 300), ("evaluator", 25))
    ]
    words = ("--num_actors", "1", "--steps", "100000000", "--evaluator.period", "0.5")
    with Program(tmp_path, *FAULTY, *words, environment=faults(*leaving)) as program:
        for name in ("actor 0", "evaluator 0"):
            program.until(lambda name=name: f"{name} restarted (1 of" in program.output, 60, f"{name} to be replaced")
            told = rf"{name} \(pid \d+\) exited with code 0 without an error message, within environment 0"
            assert re.search(told, program.output)
        program.until_training(program.agent_steps() + 1_000)
        score = "evaluator/episodic_return_mean"
        program.until(lambda: any(score in row["values"] for row in program.metrics()), 30, "an evaluation")
        program.process.send_signal(2)
        assert program.until_ended(15 * SLOW) == 130 and not program.leftovers()
    tested = start(
        tmp_path,
        *FAULTY,
        *shlex.split("--mode 2 --episodes 3"),
        environment=faults({"kind": "leave", "where": "tester", "at": 10}),
    )
    assert tested.returncode == 4 and "exited with code 0 without an error message" in tested.stderr


@pytest.mark.slow
def test_f55_children_of_environments_end_with_an_inline_run(tmp_path):
    with Program(tmp_path, *FAULTY, *INLINE, "--updates", "20", environment=faults({"kind": "start"})) as program:
        program.until(lambda: program.strays(), 60, "strays")
        assert program.until_ended(30 * SLOW) == 0 and not program.leftovers()
        assert [len(started) for started in program.strays().values()] == [0]


@pytest.mark.slow
def test_f21_f55_children_of_environments_end_with_a_check_that_is_terminated(tmp_path):
    environment = faults({"kind": "start", "once": str(tmp_path / "once")}, {"kind": "hang", "at": 3})
    with Program(tmp_path, *FAULTY, "--check", environment=environment) as program:
        program.until(lambda: program.strays(), 60, "strays")
        program.process.terminate()
        assert program.until_ended(15 * SLOW) == 143 and not program.leftovers()
        assert [len(started) for started in program.strays().values()] == [0]
        assert "Traceback" not in program.output


def test_f50_a_relative_root_survives_an_environments_chdir(start_here, tmp_path):
    environment = faults({"kind": "chdir"})
    trained = start_here(tmp_path, *FAULTY, *INLINE, "--root", "here", "--updates", "5", environment=environment)
    assert trained.returncode == 0, trained.stderr
    assert {path.name for path in (tmp_path / "here" / "models").iterdir()} == {"test_one.pth", "test_one_checkpoints"}
    assert (tmp_path / "here" / "logs" / "test_one" / "metrics.jsonl").exists() and [
        path.name for path in tmp_path.iterdir()
    ] == ["here"]
