"""TensorBoard's page shows a run in a headless Chromium."""

import json
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from core.metrics.file_writers import MetricsFiles
from core.runtime.log_buffers import Record

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
START_SECONDS = 90


@pytest.fixture
def page(tmp_path):
    """Start a TensorBoard that shows one run with scalars of two namespaces, and yield its address."""
    folder = tmp_path / "logs" / "box_1"
    folder.mkdir(parents=True)
    files = MetricsFiles(folder, 0)
    for step in (100, 200, 300):
        files.write(
            [Record(name, step / 100, step, time.time()) for name in ("learner/loss", "actor/episodic_return_mean")],
            step,
        )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tensorboard.main",
            "--logdir",
            str(folder.parent),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def loaded_tags(page):
    """Return the scalar tags that the server has read, by run; the server needs some seconds to start."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{page}/data/plugin/scalars/tags", timeout=5) as answer:
                if tags := json.load(answer):
                    return {run: set(found) for run, found in tags.items()}
        except OSError:
            pass
        time.sleep(0.2)
    pytest.fail("TensorBoard did not answer")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.timeout(240)
def test_the_page_shows_the_scalars_of_the_run(page, tmp_path):
    assert loaded_tags(page) == {"box_1": {"learner/loss", "actor/episodic_return_mean"}}
    shown = subprocess.run(
        [
            CHROMIUM,
            *shlex.split("--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"),
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,1200",
            "--virtual-time-budget=30000",
            "--dump-dom",
            f"{page}/#timeseries",
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    for text in ("box_1", "learner/loss", "actor/episodic_return_mean"):
        assert text in shown, f"the page does not show {text}"
