"""A process that Ray started ends with the process whose memory it uses."""

import subprocess
import sys

import pytest

from core.common.exit_codes import TRAINING_FAILED

pytest.importorskip("ray")


@pytest.mark.slow
def test_a_process_ends_with_the_owner_of_its_memory():
    program = "from core.engines.ray.worker import end_with; end_with({}); print(flush=True); input()"
    with subprocess.Popen(["sleep", "60"]) as owner:
        command = [sys.executable, "-c", program.format(owner.pid)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, **pipes, text=True) as member:
            try:
                assert member.stdout.readline() == "\n" and member.poll() is None
                owner.kill()
                owner.wait()
                assert member.wait(60) == TRAINING_FAILED
                assert f"the owner of its shared memory (pid {owner.pid}) has ended" in member.stderr.read()
            finally:
                owner.kill()
                member.kill()
