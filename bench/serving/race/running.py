"""A contender's server as processes: started, asked until it answers rightly, and ended with all it began."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.serving.race.contenders import Contender, Pythons, Setting, environment
from bench.serving.race.samples import Arrays
from stoker.artifacts import Artifact
from stoker.devices.cpu import cpu_s_of
from stoker.errors import ServiceError
from stoker.loadtesting.http_connection import Address, ask
from stoker.loadtesting.measurement import LoadTarget

START_S = 90.0
_STOP_S = 3.0
_CLOSE_ENOUGH = 0.02
"""Answers may differ from the engine's by so much of the largest: bf16 and other batches round otherwise."""


@dataclass(frozen=True)
class Asked:
    """What a contender is asked: the model, its samples, and what the engine alone answers to each."""

    artifact: Artifact
    samples: list[Arrays]
    expected: list[np.ndarray]


@contextmanager
def running(contender: Contender, pythons: Pythons, asked: Asked, setting: Setting, work: Path) -> Iterator[LoadTarget]:
    """The contender's server with a setting; every sample was answered rightly once before it is handed out.

    Raises:
        ServiceError: it did not come up, or its answers are wrong; with the end of its log.
    """
    port = free_ports()
    address = Address("127.0.0.1", port)
    log = work / f"{contender.name}.log"
    command = contender.command(pythons, asked.artifact, setting, port, work)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment(asked.artifact, setting, port),
            stdout=output,
            stderr=output,
            cwd=work,
            start_new_session=True,
        )
        try:
            payloads = [contender.payload(address, asked.artifact, sample) for sample in asked.samples]
            _await(process, address, payloads[0].request, log)
            for payload, expected in zip(payloads, asked.expected, strict=True):
                answer = ask(address, payload.request)
                if answer.status != 200:
                    raise ServiceError(f"{contender.name}: status {answer.status}: {answer.body[:300]!r}")
                found = contender.answer(asked.artifact, answer.head, answer.body)
                if np.abs(found - expected).max() > _CLOSE_ENOUGH * np.abs(expected).max():
                    raise ServiceError(f"{contender.name} answers something else than the engine alone")
            yield LoadTarget(address, payloads, connections=256, cpu_s=lambda: tree_cpu_s(process.pid))
        finally:
            end_tree(process)


def _await(process: subprocess.Popen[bytes], address: Address, request: bytes, log: Path) -> None:
    until = time.monotonic() + START_S
    last = ""
    while process.poll() is None and time.monotonic() < until:
        try:
            answer = ask(address, request, timeout_s=20)
            if answer.status == 200:
                return
            last = f"status {answer.status}: {answer.body[:200]!r}"
        except ServiceError as error:
            last = error.message
        time.sleep(0.25)
    end = log.read_text(encoding="utf-8", errors="replace")[-1500:]
    raise ServiceError(f"it did not come up: {last}; the end of its log:\n{end}")


def free_ports() -> int:
    """The first of three ports in a row that nobody listens at."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        with suppress(OSError), socket.socket() as second, socket.socket() as third:
            second.bind(("127.0.0.1", port + 1))
            third.bind(("127.0.0.1", port + 2))
            return port


def descendants(pid: int) -> list[int]:
    """A process and all that it or its children began and are still there."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        todo += parents.get(one, [])
    return found


def tree_cpu_s(pid: int) -> float:
    """CPU time of a process and its descendants so far [s]."""
    return cpu_s_of(descendants(pid))


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, and end what is left of it and of what it began."""
    began = descendants(process.pid)
    process.send_signal(signal.SIGINT if b"ray_server" in _command(process.pid) else signal.SIGTERM)
    until = time.monotonic() + _STOP_S
    while time.monotonic() < until and (process.poll() is None or any(map(_is_there, began))):
        time.sleep(0.05)
    for pid in began:
        if _is_there(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _is_there(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
