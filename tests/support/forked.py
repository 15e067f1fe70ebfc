"""Run our programs in processes that have already imported everything, which is most of the cost of a start.

A process that has only imported modules (`python -m tests.support.forked`) forks for each program that a test starts;
the child then continues as after `python -m`. Tests about imports and about the interpreter's own options use real
starts.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import itertools
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, AnyStr

from eos import cli

_LARGEST = 1 << 17  # bytes of one request, which contains the environment
_IMPORTED = ("eos.cli.run", "eos.cli.broker", "eos.cli.shim", "eos.testing.lineage", "typer.rich_utils")
Stream = int | IO[Any] | None
_SHOWN = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


class Popen(subprocess.Popen[AnyStr]):
    """Stand in for `subprocess.Popen(["python", "-m", *command])`; without -m if `command` begins with -c."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        group: int | None = None,
        text: bool = False,
        errors: str | None = None,
    ) -> None:
        super().__init__(
            command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=env, group=group, text=text, errors=errors
        )

    def _execute_child(
        self,
        args: list[str],
        executable: None,
        preexec_fn: None,
        close_fds: bool,
        pass_fds: tuple[int, ...],
        cwd: str | os.PathLike[str] | None,
        env: Mapping[str, str] | None,
        startupinfo: None,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: int | None,
        *others: object,
    ) -> None:
        streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        request = (list(args), os.fspath(cwd or os.getcwd()), dict(os.environ if env is None else env), gid)
        self.pid = _ask(request, streams)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        # A call with `_deadstate` comes from the garbage collector, possibly in the middle of a request.
        asks = self.returncode is None and _deadstate is None
        if asks and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid and self.returncode is None:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Query the process that forked it, because only its parent can wait for it."""
        if not wait_flags:
            with suppress(ProcessLookupError), open(os.pidfd_open(self.pid), "rb", buffering=0) as process:
                waiting = select.poll()
                waiting.register(process, select.POLLIN)
                waiting.poll()
        ended: tuple[int, int] = _ask(self.pid)
        return ended


def run(command: Sequence[str], *, input: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Stand in for `subprocess.run` with captured output; raise TimeoutExpired after 120 s."""
    given = None if input is None else subprocess.PIPE
    streams = {"stdin": given, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen[str](command, text=True, errors="surrogateescape", **streams, **options) as process:
        try:
            output, errors = process.communicate(input, timeout=120)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program: no variable of eos or Kafka except `more`, and a terminal of 200 columns."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("EOS_", "KAFKA_"))}
    return inherited | _SHOWN | dict(more)


def eos(here: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `eos ARGUMENTS` in the directory `here`, with `environment` as its only variables of eos or Kafka."""
    return run(["eos", *arguments], cwd=here, env=environment(more))


class _Forks:
    """Own the process that forks; it ends with this process, when its end of the socket is closed."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._numbers = itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self._end)

    def ask(self, request: object, streams: Sequence[int]) -> Any:
        number = next(self._numbers)
        asked = pickle.dumps((number, request))
        assert len(asked) <= _LARGEST, "the environment of a test is too large"
        socket.send_fds(self._socket, [asked], streams)
        while answered := self._socket.recv(_LARGEST):
            of, answer = pickle.loads(answered)
            if of == number:  # bytes of a request that a signal handler's exception interrupted
                return answer
        raise RuntimeError(f"{__name__} is gone: its exit code is {self._process.wait()}")

    def _end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()


_one_at_a_time = threading.Lock()
_forks = functools.cache(_Forks)


def _ask(request: object, streams: Sequence[int] = ()) -> Any:
    with _one_at_a_time:
        return _forks().ask(request, streams)


def _serve(requests: socket.socket) -> list[str]:
    """Fork until no one can send requests. In each child, return the command after setting up its process."""
    while True:
        asked, streams, *_ = socket.recv_fds(requests, _LARGEST, 3)
        if not asked:
            os._exit(0)
        number, request = pickle.loads(asked)
        if isinstance(request, int):
            requests.send(pickle.dumps((number, _ended(request))))
            continue
        pid = os.fork()
        if not pid:
            requests.close()
            command, directory, variables, group = request
            _become(directory, variables, group, streams)
            return list(command)
        for stream in streams:
            os.close(stream)
        requests.send(pickle.dumps((number, pid)))


def _ended(pid: int) -> tuple[int, int]:
    try:
        return os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # already reported, to a request that was interrupted
        return pid, 0


def _become(directory: str, variables: dict[str, str], group: int | None, streams: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if group is not None:
        os.setregid(group, group)
    for own, given in enumerate(streams):
        os.dup2(given, own)
        os.close(given)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [directory, *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]


if __name__ == "__main__":
    # The sender of the request gets the signal too, and has its own cleanup.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in _IMPORTED:
        importlib.import_module(module)
    # The library of the command line imports most of its modules with the first command.
    cli.invoke(["--version"])
    sys.stdout.flush()
    gc.freeze()
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    if sys.argv[0] == "-c":
        sys.modules["__main__"] = program = types.ModuleType("__main__")
        exec(sys.argv.pop(1), vars(program))
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
