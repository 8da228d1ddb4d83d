"""Small HTTP servers whose behaviour under load is known beforehand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from stoker.loadtesting.http_connection import Address
from stoker.loadtesting.load_generator import Payload

Handler = Callable[[bytes], Awaitable[bytes | None]]
REQUEST = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: here\r\nContent-Length: 4\r\n\r\nwhat"
PAYLOAD = Payload(REQUEST, 1)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextmanager
def served(handler: Handler) -> Iterator[Address]:
    """A server in a thread of its own; None from the handler closes the connection."""
    loop = asyncio.new_event_loop()
    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        talks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or b"0")
                answer = await handler(await reader.readexactly(length))
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()
            talks.discard(task)

    async def end() -> None:
        server.close()
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)

    server = loop.run_until_complete(asyncio.start_server(talk, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield Address(*server.sockets[0].getsockname()[:2])
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def single_server(service_s: float) -> Handler:
    """One at a time, first come first served, each for `service_s`: with Poisson arrivals a queue M/D/1.

    Times are reckoned, not slept one after the other, so that the timer's coarseness does not add up.
    """
    free_at = 0.0

    async def answer(body: bytes) -> bytes:
        nonlocal free_at
        loop = asyncio.get_running_loop()
        free_at = max(free_at, loop.time()) + service_s
        await asyncio.sleep(free_at - loop.time())
        return OK

    return answer
