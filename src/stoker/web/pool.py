"""A pool on the page of places: queried by a process of its own, while the page is open.

Whatever the pool sends is read and made small there (`stoker.pool.overview`); this process takes one line of bounded
length, within a time limit, and is held up by nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

import orjson

_FRESH_S = 4.0
"""An answer serves all pages for so long [s]."""
_ANSWER_S = 20.0
"""After which a process that has not answered is ended [s]."""
_IDLE_S = 60.0
"""A process without a request for so long is ended [s]."""
_MOST_BYTES, _MOST_SAID = 8 * 2**20, 64 * 1024
"""Most bytes of an answer, and of a failed process's message."""


class Pool:
    """What the page shows of a pool.

    Args:
        command: of a process that answers each line of its input with one line of JSON.
        name: of the pool, for people.
    """

    def __init__(self, command: Sequence[str], name: str) -> None:
        self._command, self._name = command, name
        self._process: asyncio.subprocess.Process | None = None
        self._document: dict[str, Any] = {}
        self._asked_at = -_FRESH_S
        self._asking: asyncio.Task[None] | None = None
        self._idle: asyncio.Task[None] | None = None

    async def document(self) -> dict[str, Any]:
        """The pool as it is now, or was four seconds ago at most; `problem` says in a sentence why it is not known."""
        if self._idle is not None:
            self._idle.cancel()
        if self._asking is None and time.monotonic() - self._asked_at >= _FRESH_S:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.shield(self._asking)  # who waits may go; others wait for the same answer
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.create_task(self._close_later())
        return self._document

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                self._document = await self._answer()
        except TimeoutError:
            await self._fail(f"{self._name} did not answer within {_ANSWER_S:.0f} s")
        except (OSError, ValueError) as problem:
            await self._fail(f"{self._name} cannot be shown: {problem}")
        finally:
            self._asked_at, self._asking = time.monotonic(), None

    async def _answer(self) -> dict[str, Any]:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_MOST_BYTES,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        with contextlib.suppress(ConnectionError):  # one that has ended says why
            stdin.write(b"\n")
            await stdin.drain()
        line = await stdout.readline()
        if not line:
            said = (await stderr.read(_MOST_SAID)).decode(errors="replace").strip()
            raise ValueError(f"what asks it has ended: {said.rpartition(chr(10))[2]}")
        document: dict[str, Any] = orjson.loads(line)
        return document

    async def _fail(self, problem: str) -> None:
        """End the process, whose answer may still come, and keep what was known."""
        await self._end()
        remedy = "Is it running, and its address right? It is asked again while this page is open."
        if "No module named" in problem:
            remedy = "pip install 'stoker[pool]', and start the page again."
        self._document = {**self._document, "problem": problem, "remedy": remedy}

    async def _close_later(self) -> None:
        await asyncio.sleep(_IDLE_S)
        self._idle = None
        await self._end()

    async def close(self) -> None:
        """Ask no more, and end the process; the next request starts another one."""
        for task in (self._idle, self._asking):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await process.communicate()
