"""A program that starts processes by the fork server, and prints what it saw as JSON: `python forked.py <scene>`."""

import errno
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from multiprocessing.connection import Pipe

import numpy as np

from core.common import fork_server
from core.common.shared_arrays import SharedArrays
from core.specs import ArraySpec


def describe(pipe, arrays):
    """Say who and where this process is, add to the shared array, and print."""
    arrays["sum"][0] += 1
    print("printed")
    pipe.send(
        {
            "parent": os.getppid(),
            "folder": os.getcwd(),
            "variable": os.environ.get("VARIABLE"),
            "path": sys.path[0],
            "default": multiprocessing.get_start_method(),
            "main": multiprocessing.parent_process().is_alive(),
            "descriptors": sorted(map(kind, os.listdir("/proc/self/fd"))),
            "random": np.random.rand(),  # noqa: NPY002
        }
    )


def kind(descriptor):
    """Return what a descriptor of this process is, without its number."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").partition("[")[0]
    except FileNotFoundError:
        return "that of the listing"


def start(target, *arguments):
    process = fork_server.ForkedProcess(target=target, args=arguments)
    process.start()
    return process


def seen():
    """Return what three processes say of themselves; they start once variables, folder, path and output changed."""
    arrays, told = SharedArrays({"sum": ArraySpec((1,), "int64")}), []
    output = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
    os.dup2(output, 1), os.close(output)
    os.environ["VARIABLE"], sys.path[0] = "changed", "/nowhere"
    os.chdir("/")
    for _ in range(3):
        receiver, sender = Pipe(duplex=False)
        process = start(describe, sender, arrays)
        sender.close()
        told.append(receiver.recv())
        process.join()
        start(time.sleep, 1_000)  # the server has descriptors for it, and the next process must not
    return {"told": told, "sum": int(arrays["sum"][0])}


def codes():
    """Return the exit codes of processes that end in several ways."""
    processes = [start(os._exit, 0), start(os._exit, 3), start(os.abort), start(sys.exit, 7), start(missing())]
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def missing():
    """Return a function that the process does not find."""

    def function():
        pass

    function.__qualname__ = "describe_nothing"
    globals()["describe_nothing"] = function
    return function


def server_killed():
    """Return the exit code of a process whose server is killed, whether it ended, and what a start raises then."""
    process, server = start(time.sleep, 1_000), fork_server.server_pid()
    os.kill(server, signal.SIGKILL)
    process.join()
    try:
        start(time.sleep, 0)
        raised = None
    except OSError as error:
        raised = type(error).__name__
    end = time.monotonic() + 5
    while fork_server.server_pid() and time.monotonic() < end:  # the kernel ends the processes of the server first
        time.sleep(0.01)
    return {"code": process.exitcode, "pid": process.pid, "raised": raised, "server": fork_server.server_pid()}


def shortage():
    """Return the error of a start for which the server has no descriptors, and the exit code of one after that."""
    server = fork_server.server_pid()
    limits = resource.prlimit(server, resource.RLIMIT_NOFILE)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{server}/fd")) + 2, limits[1]))
    try:
        start(time.sleep, 0)
        error = 0
    except OSError as raised:
        error = raised.errno
    resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
    process = start(os._exit, 5)
    process.join()
    return {"error": errno.errorcode[error], "code": process.exitcode}


def left():
    """Print the ids of server and process, and wait to be killed."""
    print(json.dumps([fork_server.server_pid(), start(time.sleep, 1_000).pid]), flush=True)
    time.sleep(1_000)


def operators():
    """Return torch's threads, and those of the process, after a large product in processes that ask for 1 and 3."""
    told = []
    for count in (1, 3):
        receiver, sender = Pipe(duplex=False)
        process = start(multiply, sender, count)
        told.append(receiver.recv())
        process.join()
    return told


def multiply(pipe, count):
    from core.device.torch_runtime import use_threads

    use_threads(count)
    matrix = sys.modules["torch"].ones(1_000, 1_000)
    _ = matrix @ matrix + matrix
    pipe.send([sys.modules["torch"].get_num_threads(), len(os.listdir("/proc/self/task"))])


SCENES = {scene.__name__: scene for scene in (seen, codes, server_killed, shortage, left, operators)}

if __name__ == "__main__":
    if sys.argv[1] == "threads":
        threading.Thread(target=time.sleep, args=(1,)).start()
        with fork_server.running():
            print(json.dumps(fork_server.server_pid()))
    else:
        if sys.argv[1] == "operators":
            import torch  # noqa: F401
        np.random.rand()  # noqa: NPY002 - numpy imports its random part now, which draws a first state
        original = os.dup(1)
        os.set_inheritable(original, False)
        with fork_server.running():
            server = fork_server.server_pid()
            told = {"server": server, "threads": len(os.listdir(f"/proc/{server}/task"))}
            told["scene"] = SCENES[sys.argv[1]]()
        told["ended"] = fork_server.server_pid() is None and not os.path.exists(f"/proc/{server}")
        with open(original, "w") as file:
            file.write(json.dumps(told))
