"""Run the `python -m` of shell scripts as forks of a process that has done the imports.

A shell finds a short program in place of its Python. What that is to run, a module of this project, it hands
to a process that has imported torch and the server (see `tests/serving/warm.py`), with its files, folder and
environment; it passes signals on, and ends as the module does. Everything else it leaves to the real Python,
and everything where FRESH is set: a fork is not what a user starts, and heeds no LD_PRELOAD. Style and types
it does not check, which `scripts/test.sh` has done before any test.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from tests.serving import warm

OWN = ("scripts", "recipes", "doctor")  # packages whose modules are run in forks
REPLY = 16  # bytes, of a status
PROGRAM = """\
#!{python} -SI
import array, json, os, signal, socket, sys

if sys.argv[1:3] in (["-m", "ruff"], ["-m", "mypy"]):
    sys.exit()
if "FRESH" in os.environ or sys.argv[1:2] != ["-m"] or sys.argv[2].partition(".")[0] not in {own!r}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: server.send(b"%d" % number))
request = {{"command": sys.argv[2:], "folder": os.getcwd(), "environment": {{**os.environ}}}}
files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
server.sendmsg([json.dumps(request).encode()], files)
status = int(server.recv({reply}))
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextlib.contextmanager
def forked_python(tree: Path, address: Path) -> Iterator[str | None]:
    """Give the text of a program that stands for the Python of `tree`; None where nothing can be forked."""
    if not warm.is_possible():
        yield None
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(address))
        server.listen(64)
        command = [sys.executable, "-m", __name__, str(server.fileno())]
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=tree, env=variables, pass_fds=[server.fileno()])
    try:
        yield PROGRAM.format(python=sys.executable, own=OWN, address=str(address), reply=REPLY)
    finally:
        process.terminate()
        process.wait()


def keep(connection: socket.socket) -> NoReturn:
    """Run what is asked for in a child, pass signals to it, and tell its status; end with who has asked."""
    data, files, _, _ = socket.recv_fds(connection, 1 << 17, 3)
    request = json.loads(data)
    if (child := os.fork()) == 0:
        connection.close()
        os.chdir(request["folder"])
        module, *arguments = request["command"]
        asked = {"module": module, "arguments": arguments, "environment": request["environment"]}
        warm.end_after(lambda: warm.run(asked | {"files": [0, 1, 2], "limits": []}, files))
    for each in files:
        os.close(each)
    ended = os.pidfd_open(child)
    watched: list[int | socket.socket] = [ended, connection]
    while ended not in select.select(watched, [], [])[0]:
        number = int(connection.recv(REPLY) or signal.SIGKILL)
        os.kill(child, number)
        if number == signal.SIGKILL:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.send(b"%d" % status)
    os._exit(0)


def main() -> None:
    """Import, and fork for each connection at the socket that is the argument."""
    with socket.socket(fileno=int(sys.argv[1])) as server:
        for name in warm.COSTLY:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                keep(connection)
            connection.close()
            with contextlib.suppress(ChildProcessError):  # those that have ended
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


if __name__ == "__main__":
    main()
