"""A run survives dead processes, signals and damage (F09-F14, F20-F22, F24, F25, F27, F31, F32, F37, F54-F58, F71)."""

import json
import os
import re
import resource
import shlex
import signal
import time
from pathlib import Path

import psutil
import pytest

from core.checkpoint import model_file, run_checkpoint
from tests.reliability.program import SLOW, Program
from tests.selection import slow_except

CARTPOLE = ("--config", "dqn-cartpole", "--logger.period", "0.5", "--timestamp", "one")
ENDLESS = (*CARTPOLE, "--steps", "100000000")
SAVING = (*ENDLESS, "--learner.checkpoint_period", "0.5")
STARTING = shlex.split(
    "--env_type gym --game tests.reliability.faults:Faulty-v0 --num_actors 1 --evaluator.max_steps 30"
)
STARTED = {"FAULTS": json.dumps([{"kind": "start", "where": "actor"}])}
CHUNKS = 2 * 8 * 8  # agent steps that two actors may still finish while the learner saves
FULL = 8_000  # bytes, more than a run prints and less than it writes


def manifests(root: Path) -> list[Path]:
    return sorted(root.glob("models/test_one_checkpoints/step_*/manifest.json"))


# one run that lasts through these tests, in this order ------------------------------------------------------------
@pytest.fixture(scope="module")
def run(tmp_path_factory):
    words = (*SAVING, "--num_actors", "2", "--evaluator.period", "2", "--supervisor.heartbeat_timeout", "6")
    with Program(tmp_path_factory.mktemp("run"), *words) as program:
        program.until_training(1_500)
        yield program


@pytest.fixture(scope="module")
def ended(run):
    """Return the run after it was ended and has saved."""
    if run.process.poll() is None:
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.until_ended(15 * SLOW) == 143
    return run


def replaced(program: Program, name: str, pid: int, seconds: float) -> float:
    """Wait until process `name` has a pid other than `pid`, and return the seconds that took."""
    began = time.monotonic()
    program.until(lambda: program.children().get(name, pid) != pid, seconds, f"{name} to be replaced")
    return time.monotonic() - began


@pytest.mark.slow
def test_f37_no_process_of_a_run_listens_on_a_socket(run):
    run.children()
    assert len(run.family) >= 5 and run.sockets() == []


@pytest.mark.slow
def test_f31_a_running_run_cannot_be_started_again(run, start_here):
    for words, message in ((CARTPOLE, "continue it by --resume test_one"), (("--resume", "test_one"), "still running")):
        second = start_here(run.root, *words)
        assert second.returncode == 2 and message in second.stderr
    assert len(list(run.root.glob("logs/*"))) == 1


def test_f09_f32_a_killed_actor_is_replaced_while_others_go_on(run):
    before = run.agent_steps()
    pid = run.kill("actor 0")
    run.until(lambda: run.agent_steps() >= before + 500, 5 * SLOW, "the other actor to go on")
    replaced(run, "actor 0", pid, 10 * SLOW)
    run.until(lambda: "actor 0 restarted (1 of" in run.output, 5, "the message")
    assert f"actor 0 (pid {pid}) was killed by signal 9" in run.output


@pytest.mark.parametrize("name", slow_except(["logger 0"], ["evaluator 0", "logger 0"]))
def test_f12_a_killed_evaluator_or_logger_is_replaced(run, name):
    pid, training = run.kill(name), {place: run.children()[place] for place in ("actor 0", "learner 0")}
    replaced(run, name, pid, 10 * SLOW)
    assert f"{name} (pid {pid}) was killed by signal 9" in run.output
    run.until_training(run.agent_steps() + 1_000)
    assert training.items() <= run.children().items()


@pytest.mark.slow
def test_f14_a_stopped_actor_is_reported_and_replaced(run):
    pid = run.kill("actor 1", signal.SIGSTOP)
    replaced(run, "actor 1", pid, 30)
    assert f"actor 1 (pid {pid}) sent no heartbeat for" in run.output


@pytest.mark.slow
def test_f14_a_stopped_and_continued_run_loses_no_process(run):
    before, children = run.agent_steps(), run.children()
    os.killpg(run.process.pid, signal.SIGSTOP)
    time.sleep(8)  # longer than supervisor.heartbeat_timeout
    os.killpg(run.process.pid, signal.SIGCONT)
    run.until(lambda: run.agent_steps() >= before + 2_000, 20 * SLOW, "the run to go on")
    assert run.children() == children


def test_f21_sigterm_saves_and_exits_143(run):
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.until_ended(15 * SLOW) == 143
    assert "--resume test_one --root" in run.output
    assert not run.leftovers() and run.steps() == sorted(run.steps())
    state, _ = run_checkpoint.load(run.root / "models" / "test_one_checkpoints")
    assert sum(state["clock"]["agent_steps"]) >= run.agent_steps() - CHUNKS


@pytest.mark.slow
def test_f24_f25_f27_resume_survives_damage_and_a_full_disk(ended, start_here):
    damaged, sound = manifests(ended.root)[-1].parent, manifests(ended.root)[-2].parent
    content = bytearray((damaged / "agent.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "agent.pt").write_bytes(content)
    begun, earlier = int(sound.name.split("_")[1].split(".")[0]), len(ended.steps())
    refused = start_here(ended.root, "--resume", "test_one", "--model.hidden", "7")
    assert (
        refused.returncode == 2
        and "model.hidden=7 cannot continue run test_one, which has model.hidden=" in refused.stderr
    )
    with Program(
        ended.root, "--resume", "test_one", "--agent.learning_rate", "1e-5", "--learner.checkpoint_period", "2"
    ) as program:
        program.until(lambda: "agent.learning_rate=1e-05 (was 0.001)" in program.output, 60, "the change to be printed")
        program.until(lambda: f"falling back to checkpoint {sound.name}" in program.output, 30, "the fall-back")
        assert f"damaged checkpoint {damaged.name}: agent.pt does not have the SHA-256" in program.output
        program.until(
            lambda: any(steps > begun + 500 for steps in program.steps()[earlier:]) and len(program.children()) == 5,
            60,
            "training to go on",
        )
        program.until(
            lambda: min(path.stat().st_size for path in ended.root.glob("logs/test_one/metrics.*")) > FULL,
            60,
            "longer files",
        )
        kept = [path for path in manifests(ended.root) if path.parent != damaged]
        steps, lines = (
            program.agent_steps(),
            [path.read_text() for path in sorted(ended.root.glob("logs/test_one/metrics.*"))],
        )
        assert min(map(len, lines)) > FULL > len(program.output)
        for pid in program.children().values():  # like a full disk: no file may grow beyond this
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
        program.until(
            lambda: "checkpoint not written" in program.output and "metrics cannot be written" in program.output,
            20,
            "both warnings",
        )
        assert all(run_checkpoint.read(path.parent, None) for path in kept if path.exists()) and run_checkpoint.load(
            damaged.parent
        )
        for pid in program.children().values():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        counted = "global/metric_write_errors"
        program.until(
            lambda: any(row["values"].get(counted, 0) > 0 for row in program.metrics()), 20, "a count of the errors"
        )
        assert program.agent_steps() > steps and len(program.children()) == 5 and "restarted" not in program.output
        # compare from the start of each line, because the table may have gained a column
        for path, old in zip(sorted(ended.root.glob("logs/test_one/metrics.*")), lines):
            assert all(
                line.startswith(before)
                for line, before in zip(path.read_text().splitlines(), old.splitlines(), strict=False)
            )
        os.kill(program.process.pid, signal.SIGINT)
        exit_code = program.until_ended(15 * SLOW)  # 4 if the best model was found while the disk was full
        lost = "the last write of evaluator 0 failed: not all that this run made is on disk" in program.output
        assert exit_code == (4 if lost else 130)
        assert not lost or "best model not written" in program.output
        assert not program.leftovers()


@pytest.mark.slow
def test_f24_a_checkpoint_of_another_agent_is_refused(ended, start_here):
    folder = manifests(ended.root)[-1].parent.parent
    state, _ = run_checkpoint.load(folder)
    run_checkpoint.save(folder, {**state, "agent": {"weights": {}}}, 10**8 - 1, keep=2)
    refused = start_here(ended.root, "--resume", "test_one", "--engine", "inline")
    assert refused.returncode == 3, refused.stderr
    assert re.search(r"/step_000099999999 does not fit this run \(.*\): start a new one", refused.stderr)


@pytest.mark.slow
def test_f24_resume_is_refused_if_all_checkpoints_are_damaged(ended, start_here):
    for path in manifests(ended.root):
        (path.parent / "clock.pt").write_bytes(b"0" * (path.parent / "clock.pt").stat().st_size)
    before = {path: path.is_dir() or path.stat().st_mtime_ns for path in ended.root.rglob("*")}
    refused = start_here(ended.root, "--resume", "test_one")
    assert refused.returncode == 3 and "Traceback" not in refused.stderr
    assert re.search(
        r"error: every checkpoint in .* is damaged .*clock.pt does not have the SHA-256.*; start a new run",
        refused.stderr,
    )
    assert {path: path.is_dir() or path.stat().st_mtime_ns for path in ended.root.rglob("*")} == before


# other ends -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_f10_an_actor_that_dies_too_often_ends_the_run_with_4(tmp_path):
    with Program(tmp_path, *ENDLESS, "--supervisor.max_restarts", "1") as program:
        program.until_training(500)
        replaced(program, "actor 0", program.kill("actor 0"), 15)
        program.kill("actor 0")
        assert program.until_ended(30) == 4
        assert "supervisor.max_restarts" in program.output and "--resume test_one" in program.output
        assert manifests(tmp_path)
        assert not program.leftovers()


def test_f11_a_killed_learner_ends_the_run_with_a_resume_hint(tmp_path):
    with Program(tmp_path, *ENDLESS, "--learner.checkpoint_replay", "--learner.checkpoint_period", "0.1") as program:
        program.until_training(500)
        program.until(
            lambda: manifests(tmp_path) and list((tmp_path / "models").glob("*/.temporary_*")),
            60,
            "a second checkpoint in the making",
        )
        program.kill("learner 0")
        assert program.until_ended(15 * SLOW) == 4
        assert "learner 0" in program.output and "--config dqn-cartpole --resume test_one --root" in program.output
        assert not program.leftovers()


@pytest.mark.slow
def test_f71_killing_the_fork_server_ends_the_run(tmp_path):
    with Program(tmp_path, *SAVING) as program:
        program.until(lambda: manifests(tmp_path), 60, "the first checkpoint")
        server = program.fork_server()
        assert {psutil.Process(pid).ppid() for pid in program.children().values()} == {server}
        assert len(os.listdir(f"/proc/{server}/task")) == 1
        assert "memfd" not in Path(f"/proc/{server}/maps").read_text()  # nothing of the run
        os.kill(server, signal.SIGKILL)
        assert program.until_ended(15 * SLOW) == 4
        assert re.search(rf"learner 0 .*was killed with the fork server \(pid {server}\)", program.output)
        assert "--resume test_one" in program.output and not program.leftovers()


def test_f13_f55_killing_main_ends_its_children_and_theirs(tmp_path):
    with Program(tmp_path, *ENDLESS, *STARTING, environment=STARTED) as program:
        program.until_training(500)
        program.children()
        assert [len(started) for started in program.strays().values()] == [4]
        os.kill(program.process.pid, signal.SIGKILL)
        assert not program.leftovers(seconds=3 * SLOW, was_killed=True)


@pytest.mark.slow
def test_f56_f58_sigquit_during_imports_leaves_no_process(tmp_path):
    def before():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # The process that runs the tests may ignore or block SIGQUIT, as a shell's background job does.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGQUIT])

    with Program(tmp_path, *ENDLESS, before=before) as program:
        program.until(lambda: (program.children(), len(program.family) >= 5)[1], 60, "children to be started")
        os.kill(program.process.pid, signal.SIGQUIT)
        assert program.until_ended(3 * SLOW) == -signal.SIGQUIT
        assert not program.leftovers(seconds=3 * SLOW, was_killed=True)


def no_descriptors(pid: int) -> tuple[int, int]:
    """Forbid a process to open more descriptors and return its previous limits."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(taken) + 1)) - taken), limits[1]))
    return limits


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_f54_f55_f56_f57_restarts_are_retried_and_sighup_saves(tmp_path):
    """The caller ignores SIGCHLD."""

    def before():
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with Program(tmp_path, *SAVING, *STARTING, environment=STARTED, before=before) as program:
        program.until_training(500)
        first = program.children()["actor 0"]
        assert len(program.strays()[first]) == 4
        assert replaced(program, "actor 0", program.kill("actor 0"), 15 * SLOW)
        killed = f"actor 0 (pid {first}) was killed by signal 9"
        program.until(lambda: killed in program.output, 15 * SLOW, "the message")
        program.until(lambda: len(program.strays()) == 2, 60, "the new actor's first steps")
        second = program.children()["actor 0"]
        assert {pid: len(started) for pid, started in program.strays().items()} == {first: 0, second: 4}

        limits = no_descriptors(program.process.pid)
        program.kill("actor 0")
        program.until(lambda: "actor 0 could not be started" in program.output, 15 * SLOW, "a restart that fails")
        resource.prlimit(program.process.pid, resource.RLIMIT_NOFILE, limits)
        replaced(program, "actor 0", second, 20 * SLOW)
        program.until_training(program.agent_steps() + 500)

        os.kill(program.process.pid, signal.SIGHUP)
        assert program.until_ended(15 * SLOW) == 129
        program.strays()
        assert not program.leftovers() and "--resume test_one" in program.output
        state, _ = run_checkpoint.load(tmp_path / "models" / "test_one_checkpoints")
        assert sum(state["clock"]["agent_steps"]) >= program.agent_steps() - CHUNKS


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_f54_an_actor_that_cannot_be_restarted_ends_the_run(tmp_path):
    with Program(tmp_path, *ENDLESS) as program:
        program.until_training(500)
        no_descriptors(program.process.pid)
        program.kill("actor 0")
        assert program.until_ended(31 + 30 * SLOW) == 4 and not program.leftovers()
        assert program.output.count("could not be started") == 6 and "--resume test_one" in program.output
        state, _ = run_checkpoint.load(tmp_path / "models" / "test_one_checkpoints")
        assert sum(state["clock"]["agent_steps"]) >= program.agent_steps() > 0


@pytest.mark.slow
@pytest.mark.parametrize("begun", ["main imports", "children are started"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_f20_f21_a_signal_during_start_up_leaves_no_process(tmp_path, begun, number):
    with Program(tmp_path, *ENDLESS) as program:
        maps = Path(f"/proc/{program.process.pid}/maps")
        moments = {
            "main imports": lambda: "numpy" in maps.read_text(),
            "children are started": lambda: (program.children(), len(program.family) >= 3)[1],
        }
        program.until(moments[begun], 60, begun)
        os.killpg(program.process.pid, number)  # like a terminal, to the whole process group
        assert program.until_ended(15 * SLOW) == 128 + number, program.output
        assert not program.leftovers()
        assert "Traceback" not in program.output and "restarted" not in program.output, program.output


@pytest.mark.slow
def test_f20_ctrl_c_while_evaluating_and_saving_exits_130(tmp_path):
    words = ("--learner.checkpoint_replay", "--learner.checkpoint_period", "0.1", "--evaluator.period", "0.01")
    with Program(tmp_path, *ENDLESS, *words) as program:
        program.until(
            lambda: manifests(tmp_path) and (tmp_path / "models" / "test_one.pth").exists(),
            60,
            "evaluation and checkpoint",
        )
        program.until_training(CHUNKS + 1)
        program.until(
            lambda: manifests(tmp_path) and list((tmp_path / "models").glob("*/.temporary_*")),
            20,
            "a checkpoint in the making",
        )
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(15 * SLOW) == 130
        assert not program.leftovers()
        state, _ = run_checkpoint.load(tmp_path / "models" / "test_one_checkpoints")
        assert sum(state["clock"]["agent_steps"]) >= program.agent_steps() - CHUNKS > 0
        model_file.load_weights(tmp_path / "models" / "test_one.pth")


@pytest.mark.slow
def test_f22_a_second_ctrl_c_exits_at_once_with_files_intact(tmp_path):
    with Program(tmp_path, *SAVING) as program:
        program.until(lambda: manifests(tmp_path), 60, "the first checkpoint")
        os.kill(program.children()["learner 0"], signal.SIGSTOP)  # so that it cannot save
        os.kill(program.process.pid, signal.SIGINT)
        time.sleep(1)
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(3 * SLOW) == 130
        assert re.search("learner 0.* did not end within . s: killed", program.output)
        assert not program.leftovers()
        run_checkpoint.load(tmp_path / "models" / "test_one_checkpoints")
