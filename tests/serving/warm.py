"""Start servers, ranks and commands as forks of a process that has done the imports.

A server costs three seconds of a processor before it answers, of which two and a half are imports. `start`
runs a command of this project in a fork of one process that each test run keeps for it. The server's
engine is such a fork, too, and a child of the server as usual, and so are the engine's further ranks: each
learns from the system that another has ended. Only `python -m` is left out. `completed` stands in for
subprocess.run, and `forked_processes` for the way in which `multiprocessing` and engines start ranks.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.util
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from recipes.cluster import rank_process
from recipes.cluster.rank_process import FOLLOWER
from recipes.schema.recipe import ROOT
from serving.engine.process import SPARE
from tests.patience import PATIENCE_S

# None of them starts a thread, which a fork would not have
COSTLY = (
    "torch",
    "torch._dynamo",  # which torch_npu imports
    "jsonschema",
    "serving.server",
    "scripts.serve",
    "scripts.route",
    "recipes.assembly.engine",
    "serving.engine.main",
    "serving.engine.worker",
    "serving.engine.page_exchange",
    "serving.own_processors",
    "attention.cpu.attention",
    "devices.onednn",
    "llguidance",
    "pydantic.v1",  # which FastAPI imports at the first route
    "anyio._backends._asyncio",
    "uvicorn.lifespan.on",
    FOLLOWER,
)
_PR_SET_CHILD_SUBREAPER = 36
_ASKING = threading.Lock()  # answers come in the order of the requests
_LONGEST_REQUEST, _MOST_FILES = 1 << 17, 32
CODE = "-c"  # it replaces a module's name: its first argument is run
FORKED = "--multiprocessing-fork"  # a command of `multiprocessing` ends with it
READY = b"ready"
_spawns = multiprocessing.util.spawnv_passfds


class Process:
    """A child of this process, with what tests use of subprocess.Popen."""

    def __init__(
        self,
        pid: int,
        *,
        stderr: IO[str] | None = None,
        stdin: IO[bytes] | None = None,
        stdout: IO[bytes] | None = None,
    ) -> None:
        self.pid, self.stderr, self.stdin, self.stdout = pid, stderr, stdin, stdout
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status, negative for a signal."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._ended)
        return self.returncode

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def start(
    module: str, arguments: Sequence[str], environment: dict[str, str], limits: dict[int, int]
) -> Process:
    """Run `python -m MODULE ARGUMENT ...` in a fork under limits of the system; its stderr is a pipe."""
    reader, writer = os.pipe()
    try:
        files = {1: 1, 2: writer}
        pid = ask(_source(), module, arguments, environment, files, limits=limits)
    finally:
        os.close(writer)
    return Process(pid, stderr=os.fdopen(reader, encoding="utf-8", errors="replace"))


def start_speaking(module: str, arguments: Sequence[str], environment: dict[str, str]) -> Process:
    """Run `python -m MODULE ARGUMENT ...` in a fork; its standard input and output are pipes."""
    (their_input, our_input), (our_output, their_output) = os.pipe(), os.pipe()
    try:
        pid = ask(_source(), module, arguments, environment, {0: their_input, 1: their_output})
    finally:
        os.close(their_input)
        os.close(their_output)
    return Process(pid, stdin=os.fdopen(our_input, "wb"), stdout=os.fdopen(our_output, "rb"))


def start_session(
    module: str, arguments: Sequence[str], environment: dict[str, str], printed: IO[bytes]
) -> Process | subprocess.Popen[bytes]:
    """Run `python -m MODULE ARGUMENT ...` in a fork that leads a session, by which all of it can be ended."""
    if not is_possible():
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=printed, stderr=printed, start_new_session=True
        )
    files = {1: printed.fileno(), 2: printed.fileno()}
    return Process(ask(_source(), module, arguments, environment, files, leads_session=True))


def completed(
    *command: str, given: str = "", source: socket.socket | None = None, limit_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """Run `python -m COMMAND` or `python -c CODE` in a fork; return its status and what it has printed."""
    if source is None and not is_possible():
        words = command if command[0] == CODE else ("-m", *command)
        return subprocess.run(
            [sys.executable, *words], cwd=ROOT, input=given, capture_output=True, text=True, check=False
        )
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(given.encode())
        files[0].seek(0)
        numbers = {number: each.fileno() for number, each in enumerate(files)}
        first, *arguments = command
        process = Process(ask(source or _source(), first, arguments, dict(os.environ), numbers))
        try:
            status = process.wait(limit_s)
        finally:
            process.kill()
        for each in files:
            each.seek(0)
        _, printed, log = (each.read().decode(errors="replace") for each in files)
    return subprocess.CompletedProcess([*command], status, printed, log)


@contextlib.contextmanager
def forked_processes() -> Iterator[None]:
    """Let this process start as forks what `multiprocessing` spawns, and an engine's further ranks."""
    if not is_possible():
        yield
        return
    inside, before = vars(rank_process), subprocess
    spawns = vars(multiprocessing.util)
    try:
        inside["subprocess"], spawns["spawnv_passfds"] = Ranks(_source()), Spawns(_source())
        yield
    finally:
        inside["subprocess"], spawns["spawnv_passfds"] = before, _spawns


def is_possible() -> bool:
    """Whether processes can be forked here; a device's driver may start threads when torch is imported."""
    return sys.platform == "linux" and _first()[1]


def _source() -> socket.socket:
    return _first()[0]


@functools.cache
def _first() -> tuple[socket.socket, bool]:
    """Start the process of which all are forks, which ends with this one; return whether it can be forked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours, ours.recv(64) == READY


def ask(
    source: socket.socket,
    module: str,
    arguments: Sequence[str],
    environment: dict[str, str],
    files: dict[int, int],
    *,
    leads_session: bool = False,
    limits: dict[int, int] | None = None,
) -> int:
    """Have a module run by a fork of the process at `source`, with these files, and return its id."""
    request = {
        "module": module,
        "arguments": [*arguments],
        "environment": environment,
        "files": [*files],
        "leads_session": leads_session,
        "limits": [*(limits or {}).items()],
    }
    with _ASKING, _adopting():
        socket.send_fds(source, [json.dumps(request).encode()], [*files.values()])
        return int(source.recv(64))


def answer(source: socket.socket) -> None:
    """Fork for each request until the other end has closed."""
    while True:
        data, files, _, _ = socket.recv_fds(source, _LONGEST_REQUEST, _MOST_FILES)
        if not data:
            return
        request = json.loads(data)
        if (pid := _forked_beside(leads_session=request["leads_session"])) == 0:
            source.close()
            end_after(functools.partial(run, request, files))
        for each in files:
            os.close(each)
        source.send(str(pid).encode())


def end_after(runs: Callable[[], None]) -> NoReturn:
    """Run, and end this fork as an interpreter ends, except that it does not take its modules apart.

    Most of them it shares with the process that it is a fork of, and to free them it would copy all their
    pages, which takes longer than many a command.
    """
    status = 0
    try:
        runs()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - an interpreter shows whatever was raised, and ends
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter does
    atexit._run_exitfuncs()
    for each in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # who reads it has gone, or it is closed
            each.flush()
    os._exit(status & 0xFF)


def _forked_beside(*, leads_session: bool) -> int:
    """Fork a process whose parent is not this one but the nearest that adopts processes: who asks for it.

    It tells its id itself, once it leads its session, since whoever knows that may end the session.
    """
    reader, writer = os.pipe()
    if (between := os.fork()) == 0:
        if os.fork():
            os._exit(0)
        if leads_session:
            os.setsid()
        os.write(writer, str(os.getpid()).encode())
        os.close(reader)
        os.close(writer)
        return 0
    os.close(writer)
    os.waitpid(between, 0)
    with os.fdopen(reader, "rb") as told:
        return int(told.read())


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Let this process become the parent of processes whose own parent, below it, ends meanwhile."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def run(request: dict[str, Any], files: list[int]) -> None:
    """Run the module as `python -m` does."""
    above = max(request["files"]) + 1  # so that none is written over by another
    apart = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in files]
    for each in files:
        os.close(each)
    for number, each in zip(request["files"], apart, strict=True):
        os.dup2(each, number)
        os.close(each)
    for name, most in request["limits"]:
        resource.setrlimit(name, (most, most))
    os.environ.clear()
    os.environ.update(request["environment"])
    module, arguments = request["module"], request["arguments"]
    becomes = arguments[0] if module == SPARE else module
    Path("/proc/self/comm").write_text(becomes.rpartition(".")[2])  # tests find it by this name
    sys.argv = [module, *arguments]
    if module == "scripts.verify":
        nest = _nest()
        inside = vars(importlib.import_module("doctor.verify.report"))
        inside["ended"] = lambda command: completed(*command[2:], source=nest)
    elif arguments[-1:] != [FORKED]:
        nest, is_divided = None, any(each.startswith("parallel.") for each in arguments)
        if module.startswith("scripts."):
            nest = _nest()
            vars(asyncio)["create_subprocess_exec"] = Engines(nest).start
        if module == CODE or is_divided:  # the arguments of code do not say whether there are more ranks
            nest = nest or _nest()
            vars(rank_process)["subprocess"] = Ranks(nest)
            vars(multiprocessing.util)["spawnv_passfds"] = Spawns(nest)
    if module == CODE:
        sys.argv = [CODE, *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        return
    for name in (module, *arguments[:1]):  # and the module that a spare process goes on as
        sys.modules.pop(name, None)  # else runpy warns that it is there, in the log
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _nest() -> socket.socket:
    """Return the connection to a child of this process, of which its engines are forks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        answer(theirs)
        os._exit(0)
    theirs.close()
    return ours


class Engines:
    """Start a server's engines as forks of the process at `nest`, by default that of all servers."""

    def __init__(self, nest: socket.socket | None = None) -> None:
        self.forks_spares = True
        self._nest = nest or _source()
        self._executes = asyncio.create_subprocess_exec

    async def start(self, *command: str, **options: Any) -> Any:
        """Stand in for asyncio.create_subprocess_exec."""
        if command[1] != "-m" or (command[2] == SPARE and not self.forks_spares):
            return await self._executes(*command, **options)
        (their_input, our_input), (our_log, their_log) = os.pipe(), os.pipe()
        files = {0: their_input, 2: their_log}
        pid = ask(self._nest, command[2], command[3:], dict(os.environ), files, leads_session=True)
        for each in files.values():
            os.close(each)
        process = _Engine(pid, _Input(our_input))
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(process.stderr), os.fdopen(our_log, "rb", 0)
        )
        return process


class Ranks:
    """Start an engine's further ranks as forks; it stands in for the module subprocess."""

    PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self, nest: socket.socket) -> None:
        self._nest = nest

    def Popen(self, command: list[str], *, env: dict[str, str], **_: Any) -> Process:
        """Start a rank, which is told its recipe by its standard input."""
        theirs, ours = os.pipe()
        pid = ask(self._nest, command[2], command[3:], env, {0: theirs})
        os.close(theirs)
        return Process(pid, stdin=os.fdopen(ours, "wb"))


class Spawns:
    """Start what `multiprocessing` spawns as forks; it stands in for multiprocessing.util.spawnv_passfds."""

    def __init__(self, nest: socket.socket) -> None:
        self._nest = nest

    def __call__(self, path: bytes, command: Sequence[str], files: Sequence[int]) -> int:
        """Start a process that has these files under the same numbers, and return its id."""
        if command[-1] != FORKED:  # it is what tracks resources
            return int(_spawns(path, command, files))
        code = [*command[command.index(CODE) + 1 :]]
        return ask(self._nest, CODE, code, dict(os.environ), {each: each for each in {0, 1, 2, *files}})


class _Input:
    """Standard input of an engine, of which only few bytes are ever written."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "wb", 0)

    def write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(data)

    def close(self) -> None:
        self._pipe.close()


class _Engine:
    """A child of this process, as asyncio has it."""

    def __init__(self, pid: int, stdin: _Input) -> None:
        self.pid, self.stdin = pid, stdin
        self.stderr = asyncio.StreamReader()
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._has_ended = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._end)

    def _end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._has_ended.set()

    async def wait(self) -> int:
        await self._has_ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def main() -> None:
    """Import, and answer at the socket that is the argument."""
    with socket.socket(fileno=int(sys.argv[1])) as source:
        for name in COSTLY:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        if len(os.listdir("/proc/self/task")) == 1 and _can_be_waited_for():  # a fork lacks other threads
            source.send(READY)
            answer(source)


def _can_be_waited_for() -> bool:
    """Whether the system, and a container's rules, let processes be waited for beside others."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
