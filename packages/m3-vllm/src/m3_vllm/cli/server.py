"""A real vLLM server on CPUs as a child process: started, waited for, asked, stopped, and checked to have left nothing behind.

For the demonstration and the tests; it is no sub-command.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import structlog
from attrs import Factory, define, field, frozen

from m3_core.errors import ResourceError
from m3_vllm.settings import SECTION

log = structlog.get_logger(__name__)

SHARED_MEMORY = Path("/dev/shm")
MARK = "M3_SERVER_MARK"
"""Environment variable with a value of this server's own, which its descendants inherit. A process that changes its title (vLLM's
workers do) overwrites what /proc shows of its environment; it is known by its session."""
POLL_SECONDS = 0.1


def cpu_environment(ranks: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of vLLM on CPUs with ``ranks`` workers, one core each, offline.

    Args:
        ranks: tensor-parallel width.
        base: environment to extend; the process's own if None. Its values win, so that a user can override every choice here.
    """
    cores = sorted(os.sched_getaffinity(0))
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM kills a worker that takes longer, and its shared memory then stays behind; a loaded machine needs more than the default 5 s.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "30",
    }
    return {**defaults, **(os.environ if base is None else base)}


@frozen(kw_only=True)
class Stopped:
    """How a server ended, and what it left behind.

    Attributes:
        code: its exit code; None if it never started.
        processes: "pid command" of its processes that still ran; they have been killed since.
        segments: names in /dev/shm that its processes mapped and that outlived them.
    """

    code: int | None
    processes: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """One sentence on what was not clean, or None."""
        parts = []
        if self.code not in (0, None):
            parts.append(f"ended with code {self.code}")
        if self.processes:
            parts.append(f"left processes {list(self.processes)}")
        if self.segments:
            parts.append(f"left segments {list(self.segments)}")
        return f"the server {' and '.join(parts)}" if parts else None


@define(kw_only=True, eq=False)
class Server:
    """One server; a context manager that starts it, waits until it answers, and stops it.

    Attributes:
        model: checkpoint folder.
        log_file: where its output goes, whole.
        settings: m3's settings, the value of ``additional_config["m3"]``.
        tensor_parallel: ranks.
        arguments: further arguments of vLLM's server.
        environment: variables that win over the defaults of :func:`cpu_environment` and the process's own.
        ready_seconds: bound of the wait until it answers.
        stop_seconds: bound of the wait from SIGTERM to its exit; vLLM itself gets two thirds for its workers.
        port: TCP port on the loopback interface; a free one is chosen at the start.
    """

    model: Path
    log_file: Path
    settings: Mapping[str, Any] = Factory(dict)
    tensor_parallel: int = 2
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = Factory(dict)
    ready_seconds: float = 240.0
    stop_seconds: float = 60.0
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _log: IO[bytes] | None = field(default=None, init=False)
    _stopped: Stopped | None = field(default=None, init=False)
    _mark: str = field(factory=lambda: secrets.token_hex(8), init=False)

    def __enter__(self) -> Server:
        """Start and wait; stops what it started if the wait fails."""
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop; raises ResourceError for an end that was not clean, unless another error is on its way."""
        problem = self.stop().problem()
        if problem is not None and error is None:
            raise ResourceError(f"{problem}; its log: {self.log_file}")

    @property
    def pid(self) -> int:
        """Process id of the API server."""
        return self._running().pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Start the process; returns at once."""
        if self._process is not None:
            raise ResourceError(f"the server already runs as process {self._process.pid}; make another Server")
        self.port = self.port or _free_port()
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *("--model", str(self.model), "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16"),
            *("--tensor-parallel-size", str(self.tensor_parallel), "--shutdown-timeout", str(int(self.stop_seconds * 2 / 3))),
            *("--additional-config", json.dumps({SECTION: dict(self.settings)})),
            *self.arguments,
        ]
        environment = {**cpu_environment(self.tensor_parallel), **self.environment, MARK: self._mark}
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.log_file.open("wb")
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        log.info("server_started", pid=self._process.pid, port=self.port, settings=dict(self.settings))

    def wait_ready(self) -> float:
        """Wait until the server answers.

        Returns:
            Seconds since the call.

        Raises:
            ResourceError: it ended, or did not answer within ``ready_seconds``; with the end of its log.
        """
        process, begin = self._running(), time.monotonic()
        while (waited := time.monotonic() - begin) < self.ready_seconds:
            if self._healthy():
                log.info("server_ready", seconds=round(waited, 1))
                return waited
            try:
                process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            raise ResourceError(
                f"the server ended with code {process.returncode} before it answered; the end of {self.log_file}:\n{self.tail()}"
            )
        raise ResourceError(f"the server did not answer within {self.ready_seconds} s; the end of {self.log_file}:\n{self.tail()}")

    def wait_end(self, seconds: float) -> int:
        """Wait for the server to end by itself; returns its exit code.

        Raises:
            ResourceError: it still runs after ``seconds``.
        """
        try:
            return self._running().wait(seconds)
        except subprocess.TimeoutExpired:
            raise ResourceError(f"the server still runs after {seconds} s; the end of {self.log_file}:\n{self.tail()}") from None

    def get(self, path: str, seconds: float = 30.0) -> str:
        """Body of ``GET path``; raises ResourceError on any status but 200."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)) as connection:
            connection.request("GET", path)
            return _body(connection.getresponse(), path)

    def post(self, path: str, body: Mapping[str, Any], seconds: float = 300.0) -> dict[str, Any]:
        """JSON answer of ``POST path``; raises ResourceError on any status but 200."""
        with closing(self._posted(path, body, seconds)) as connection:
            answer: dict[str, Any] = json.loads(_body(connection.getresponse(), path))
            return answer

    def stream(self, path: str, body: Mapping[str, Any], seconds: float = 300.0) -> Iterator[dict[str, Any]]:
        """The events of a streamed ``POST path`` as they arrive (``"stream": true`` is added); ``seconds`` bounds each wait.

        Raises:
            ResourceError: any status but 200, or the stream ends before its last event.
        """
        with closing(self._posted(path, {**body, "stream": True}, seconds)) as connection:
            response = connection.getresponse()
            if response.status != 200:
                _body(response, path)
            for line in response:
                text = line.decode().strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data: "):
                    yield json.loads(text.removeprefix("data: "))
        raise ResourceError(f"the stream of {path} ended before its last event; the end of {self.log_file}:\n{self.tail()}")

    def segments(self) -> frozenset[str]:
        """Names in /dev/shm that its processes map now."""
        return _mapped(self.processes())

    def stop(self) -> Stopped:
        """SIGTERM, wait within ``stop_seconds``, then look for what is left and end it; a second call returns the same."""
        process = self._process
        if process is None or self._stopped is not None:
            return self._stopped or Stopped(code=None)
        begin = time.monotonic()
        deadline = begin + self.stop_seconds
        own = self.segments()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(self.stop_seconds)
            except subprocess.TimeoutExpired:
                log.error("server_did_not_stop", pid=process.pid, seconds=self.stop_seconds)
        # The parent may be gone a moment before its children are: they get what is left of the bound.
        for pid in self.processes():
            _wait_for_end(pid, deadline)
        remaining = self.processes()
        for pid in remaining:
            _kill(pid)
        process.wait(self.stop_seconds)
        if self._log is not None:
            self._log.close()
        self._stopped = Stopped(
            code=process.returncode,
            processes=tuple(f"{pid} {command}" for pid, command in remaining.items()),
            segments=tuple(sorted(name for name in own if (SHARED_MEMORY / name).exists())),
        )
        log.info("server_stopped", seconds=round(time.monotonic() - begin, 1), code=process.returncode, problem=self._stopped.problem())
        return self._stopped

    def tail(self, lines: int = 30) -> str:
        """Last lines of the log."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ResourceError("the server does not run; call start() first")
        return self._process

    def _healthy(self) -> bool:
        try:
            self.get("/health", seconds=5.0)
        except (OSError, http.client.HTTPException, ResourceError):
            return False
        return True

    def _posted(self, path: str, body: Mapping[str, Any], seconds: float) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        connection.request("POST", path, json.dumps(dict(body)), {"Content-Type": "application/json"})
        return connection

    def processes(self) -> dict[int, str]:
        """Living processes of this server's session or with its mark: process id -> command line, which vLLM sets to a name."""
        leader = self._running().pid
        mark = f"{MARK}={self._mark}".encode()
        found: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                # After the name in brackets: state, parent, group, session.
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if state != "Z" and (int(session) == leader or mark in (folder / "environ").read_bytes().split(b"\0")):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                # Ended meanwhile, or another user's: not ours to wait for.
                continue
        return found


def _body(response: http.client.HTTPResponse, path: str) -> str:
    text = response.read().decode(errors="replace")
    if response.status != 200:
        raise ResourceError(f"{path} answered {response.status}: {text[:2000]}")
    return text


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _mapped(processes: Iterable[int]) -> frozenset[str]:
    """Names in /dev/shm that any of the processes maps."""
    names: set[str] = set()
    for pid in processes:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        names.update(line.partition(f" {SHARED_MEMORY}/")[2] for line in lines)
    return frozenset(name for name in names if name and not name.endswith(" (deleted)"))


def _wait_for_end(pid: int, deadline: float) -> None:
    """Wait until a process, not necessarily a child, has ended, or until ``deadline`` of the monotonic clock."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    finally:
        os.close(handle)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        # It ended between the look and the kill.
        return
