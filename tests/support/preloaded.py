"""Python programs that start with torch and Quire imported already.

Importing them takes three seconds of computing, more than most tests take for what they test. So one process
imports them and forks for each program: a process of its own, and a child of the one that started it. The
engine of such a program is a fork of the program. Tests of what a start does, and of what it imports, start
real programs; so do those of what must not depend on Python's hash seed, which forks have in common.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from unittest import mock

import psutil

MODULES = (
    "torch",
    "quire.cli.commands.generate",
    "quire.cli.commands.serve",
    "quire.datadist.interface.llm_datadist",
    "quire.engine.core",
    "quire.engine.loop",
    "quire.engine.ranks.connecting",
    "quire.execution.model_runner",
    "quire.front.async_llm",
    "quire.front.llm",
    "quire.kernels.cpu.kernel_set",
    "quire.models.text.chat_template",
    "quire.models.checkpoints.loading",
    "quire.scheduling.scheduler",
    "quire.server.app",
    "quire.server.http.server",
    "quire.server.serve",
)

FREE_DESCRIPTOR = 500  # programs get none from here on
CLONE_PARENT = 0x8000
PR_SET_PDEATHSIG = 1
SYS_CLONE = {"x86_64": 56, "aarch64": 220}

_RealPopen = subprocess.Popen


class Popen(_RealPopen):
    """Starts `python -m MODULE`, `python -c CODE` or `python FILE` preloaded, and anything else as it is."""

    in_program: ClassVar[bool] = False

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments
        # Another thread of a program may hold a lock, which nobody in its fork would release.
        if given["args"][0] != sys.executable or (self.in_program and _num_threads() > 1):
            super()._execute_child(*arguments)
            return
        pipes = [given[f"{pair}{end}"] for pair in ("p2c", "c2p", "err") for end in ("read", "write")]
        ends = enumerate((pipes[0], pipes[3], pipes[5]))  # -1: this process's own
        passed = list(given["pass_fds"])
        program = {
            "arguments": given["args"][1:],
            "directory": str(given["cwd"] or Path.cwd()),
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "new_session": given["start_new_session"],
            "descriptors": [0, 1, 2, *passed],
        }
        fork = _fork if self.in_program else _server().fork
        self.pid = fork(program, [number if end == -1 else end for number, end in ends] + passed)
        if given["process_group"] >= 0:
            os.setpgid(self.pid, given["process_group"])
        self._child_created = True
        self._close_pipe_fds(*pipes)


@contextlib.contextmanager
def engines() -> Iterator[None]:
    """Within the block, engine processes that this process starts, and those of ranks, are preloaded."""
    _server()  # now, so that tests that count their processes and descriptors count neither
    with mock.patch.object(subprocess, "Popen", Popen):
        yield


class _Server:
    """The process that has imported everything, as this process sees it."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            command = [sys.executable, "-P", __file__, str(theirs.fileno())]
            options = {"stdin": subprocess.DEVNULL, "pass_fds": [theirs.fileno()]}
            # numpy starts no threads, and each program has the path that it is given.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
            self._process = _RealPopen(command, env=environment, **options)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, program: dict[str, Any], descriptors: list[int]) -> int:
        """Start a program as a child of this process, and give it descriptors; return its process id."""
        with self._lock:
            socket.send_fds(self._requests, [json.dumps(program).encode()], descriptors)
            return int(self._requests.recv(100))


@functools.cache
def _server() -> _Server:
    return _Server()


def other_children() -> list[psutil.Process]:
    """Return the child processes of this one but for the server and for renderers of chat templates.

    Those live until the tokenizer of another test, which did not close it, is collected.
    """
    own = [_server().pid] if _server.cache_info().currsize else []
    children = [child for child in psutil.Process().children() if child.pid not in own]
    return [child for child in children if not _renders_templates(child)]


def _renders_templates(process: psutil.Process) -> bool:
    try:
        return "quire.models.text.template_process" in process.cmdline()
    except psutil.Error:  # it has ended in the meantime
        return False


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request; return in the fork, with the program that it shall be."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, maxfds=8)
        if not message:
            os._exit(0)
        pid = _fork_sibling()
        if pid == 0:
            program = json.loads(message)
            _take(descriptors, program["descriptors"])
            return program
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _fork_sibling() -> int:
    """Fork as `os.fork` does, but with a child of this process's parent, which can wait for it."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    flags = CLONE_PARENT | signal.SIGCHLD
    pid = ctypes.PyDLL(None).syscall(SYS_CLONE[platform.machine()], flags, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _fork(program: dict[str, Any], descriptors: list[int]) -> int:
    """Start a program as a fork of this one."""
    pid = os.fork()
    if pid == 0:
        _take(descriptors, program["descriptors"])
        _run_and_exit(program)
    return pid


def _take(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors other numbers, and close all others."""
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE_DESCRIPTOR) for descriptor in descriptors]
    os.closerange(3, FREE_DESCRIPTOR)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
    os.closerange(FREE_DESCRIPTOR, os.sysconf("SC_OPEN_MAX"))


def _run_and_exit(program: dict[str, Any]) -> NoReturn:
    """Run a program and exit as Python does, without the third of a second that taking down torch takes."""
    status: Any = 0
    try:
        _run(program)
    except SystemExit as exit_:
        status = exit_.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(program: dict[str, Any]) -> None:
    """Run a program as the main program of this process."""
    _set_up(program)
    options = program["arguments"]
    safe_path = options[0] == "-P"
    kind, *arguments = options[safe_path:]
    first_entry = {"-m": program["directory"], "-c": ""}.get(kind, os.path.dirname(os.path.abspath(kind)))
    if not safe_path:
        sys.path.insert(0, first_entry)
    if kind == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[0], main.__dict__)
    else:
        sys.argv = [kind, *arguments]
        runpy.run_path(kind, run_name="__main__")


def _set_up(program: dict[str, Any]) -> None:
    """Give this process what a program has been started with."""
    if program["new_session"]:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # as in tests/support/subprocesses.py
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(program["directory"])
    os.environ.clear()
    os.environ.update(program["environment"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    subprocess.Popen = Popen


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        importlib.import_module(name)
    assert _num_threads() == 1, "a lock that another thread holds would be held in each fork for good"
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program = _serve(requests)
    Popen.in_program = True
    _run_and_exit(program)


if __name__ == "__main__":
    _main()
