"""A shell that cleans up after a process which is killed: it removes the folder of the process."""

import subprocess

# The input of this shell closes when the owner ends. Then every process that has a file of the folder open is killed,
# because Ray's agents would stay for a minute to report to what is gone. If the folder is gone, nothing is left to do.
# The shell is no child of the owner, because Ray kills the children of its processes together with them.
SWEEP = """exec 3<&0
(
    read gone <&3
    for again in 1 2 3 4 5 6; do
        [ -d "$1" ] || [ "$again" -gt 1 ] || exit
        find /proc/[0-9]*/fd -lname "$1/*" | cut -d/ -f3 | sort -u | xargs -r kill -9
        rm -rf -- "$1"
        sleep 0.3
    done
) 3<&3 &"""


class Sweeper:
    """A shell that removes a folder when this process has ended, however that happens."""

    def __init__(self, folder: str):
        """Start the shell. It also kills the processes that have files of the folder open."""
        shell = subprocess.Popen(
            ["sh", "-c", SWEEP, "sweeper", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        shell.wait()
        assert shell.stdin is not None
        self._pipe = shell.stdin

    def close(self) -> None:
        """End the shell. The folder must have been removed; otherwise the shell does it."""
        self._pipe.close()
