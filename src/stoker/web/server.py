"""The server of `stoker ui`: pages, documents and streams over HTTP on this machine's loopback.

A stream of server-sent events resumes where it ended: of a run's log the id of an event is the byte offset after its
line, so that nothing is missed and nothing comes twice, whichever side was restarted. One task looks at the runs that
train and at the logs that pages follow, and wakes all streams at once: most of what watching costs is waking up and
writing, so that each look is at most one write to each page.

Source: WHATWG HTML, 9.2 "Server-sent events" (`Last-Event-ID`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from stoker import web
from stoker.errors import BadRun, StokerError
from stoker.records.codec import JSON
from stoker.reporting.colours import colour_sheet
from stoker.reporting.wording import short
from stoker.serving.http.announced_server import AnnouncedServer
from stoker.store.foreign_files import open_below
from stoker.store.run_files import EVENTS
from stoker.store.run_query import selected_ids
from stoker.web.access import LOADER, Access, content_policy
from stoker.web.alerts import Alert, alerts_of, send
from stoker.web.pool import Pool
from stoker.web.run_index import Row, RunIndex, Tail
from stoker.web.services import Service, ask_all

if TYPE_CHECKING:
    from stoker.web.run_log import RunLog

_LIVE_S, _SCAN_S, _IDLE_S, _WHOLE_SCAN_S = 0.9, 5.0, 15.0, 60.0
"""Pauses between two looks: at the logs of runs that train, and at the folders that may have new runs; at either while
no page is open; and at everything [s]."""
_SCAN_PART_S = 0.05
"""For which folders are looked at before the logs that grow may be [s]."""
_OPENING_S = 0.6
"""For which a page that is being opened comes before the folders that were not looked at yet, at most [s]."""
_SWITCH_S = 0.001
"""After which a thread that looks at folders lets a request go on [s]; each file of a page would wait Python's 5 ms."""
_SERVICES_S = 2.0
_MOST_LOGS = 12
"""Logs that are kept folded; the one that was not asked for longest goes first."""
_AT_ONCE_BYTES = 4 * 2**20
"""Most of a log that is read while a page waits [bytes]; a longer one is previewed first."""
_PREVIEW_S = 0.5
"""For which a long log is left alone, so that its preview is drawn first [s]."""
_STREAM_BYTES = 512 * 1024
"""What a stream sends of a log; after more, as behind a page that slept for long, the page fetches the series again."""
_PING_S = 20.0
_MOST_ROWS = 20_000


_log = logging.getLogger(__name__)


@dataclass
class UiOptions:
    """What `stoker ui` was started with; see its command."""

    roots: Sequence[Path]
    token: str
    port: int
    allows_changes: bool = False
    services: Sequence[Service] = ()
    webhooks: Sequence[str] = ()
    budget_usd: float | None = None
    pool: Pool | None = None


@dataclass
class _Watch:
    """A log that streams follow."""

    followers: int = 0
    num_read: int = 0
    """How often it has been read to its end since a page got a preview of it."""
    lines: tuple[tuple[Tail, str, int], tuple[bytes, int, str, bool]] | None = None
    """What was made last: of which tail for a page that has how much of which file, and what came of it."""

    def new_lines(self, row: Row, tail: Tail, log: str, offset: int) -> tuple[bytes, int, str, bool]:
        """See `_new_lines`; once for all pages that are as far."""
        asked = (tail, log, offset)
        if self.lines is None or self.lines[0] != asked:
            self.lines = asked, _new_lines(row, tail, log, offset)
        return self.lines[1]


class Ui:
    """State of the server. `application` is what uvicorn runs."""

    def __init__(self, options: UiOptions) -> None:
        self.options = options
        self.index = RunIndex(options.roots)
        self.epoch = f"{int(time.time() * 1000):x}"
        self._logs: dict[str, RunLog] = {}
        self._watches: dict[str, _Watch] = {}
        self._rows_events: tuple[int, dict[tuple[int, str | None], bytes]] = -1, {}
        self._pages: dict[asyncio.Event, str | None] = {}
        """Of each stream what wakes it, and the run that it follows."""
        self._is_ending = False
        self._woken_at = 0.0
        self._alerts: list[tuple[int, Alert]] = []
        self._documents: dict[str, dict[str, JSON]] = {}
        self._announced = -1
        """The version of the index whose alerts were raised."""
        self._is_due = asyncio.Event()
        self._scanned_at = -math.inf
        self._is_scanned = asyncio.Event()
        self._next_part = asyncio.Event()
        """Set, and then another one, when a part of the folders has been looked at."""
        self._scan: asyncio.Task[None] | None = None
        self._is_opened = asyncio.Event()
        """Not set from the request for a page to that for its events, when it is drawn, or to one for a single run."""
        self._is_opened.set()
        self._scanner = ThreadPoolExecutor(1, "scanner")
        """Its own: looks at runs that train wait for a part of a scan, which must not wait for requests' threads."""
        self._index_lock = asyncio.Lock()
        self._services_asked = 0.0
        self._reading: dict[str, asyncio.Task[None]] = {}

    def application(self) -> Starlette:
        """The routes, behind the checks of `Access`."""

        def of_run(answer: Callable[[Row, Request], Any]) -> Callable[[Request], Any]:
            async def route(request: Request) -> Response:
                return _json(await answer(await self._row(request), request))

            return route

        pages = (
            "/",
            "/run/{rest:path}",
            "/compare",
            "/studies",
            "/study/{rest:path}",
            "/plans",
            "/plan/{rest:path}",
            "/services",
            "/places",
            "/data",
            "/data/{rest:path}",
        )
        routes = [
            *(Route(path, self._page) for path in pages),
            Route("/static/{name:path}", _static),
            Route("/api/runs", self._runs),
            Route("/api/select", self._select),
            Route("/api/events", self._events),
            Route("/api/run", of_run(self._run)),
            Route("/api/series", of_run(self._series)),
            Route("/api/confusion", of_run(self._confusion)),
            Route("/api/sections", self._sections),
            Route("/api/picture", self._picture),
            Route("/api/compare", self._compare),
            Route("/api/study", self._in_thread(lambda: web.other_views.study_document, "study")),
            Route("/api/plan", self._in_thread(lambda: web.other_views.plan_document, "plan")),
            Route("/api/plans", self._in_thread(lambda: web.other_views.plans_known)),
            Route("/api/places", self._in_thread(lambda: web.other_views.places_document)),
            Route("/api/pool", self._pool),
            Route("/api/checks", self._in_thread(lambda: web.other_views.checks_known)),
            Route("/api/check", self._check),
            Route("/api/services", self._services),
            Route("/api/do/{what}", self._do, methods=["POST"]),
        ]
        access = Middleware(
            Access, token=self.options.token, port=self.options.port, allows_changes=self.options.allows_changes
        )
        return Starlette(
            routes=routes,
            middleware=[access, Middleware(GZipMiddleware, minimum_size=2048, compresslevel=3)],
            lifespan=self._lifespan,
            exception_handlers={StokerError: _failure, HTTPException: _failure, Exception: _failure},
        )

    # ------------------------------------------------------------------------------------------------------ background

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._keep_looking())
        try:
            yield
        finally:
            for one in (task, self._scan, *self._reading.values()):
                if one is not None:
                    one.cancel()
            self._scanner.shutdown(wait=False)
            if self.options.pool is not None:
                await self.options.pool.close()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _keep_looking(self) -> None:
        """Look at the logs that grow, and at the folders, again and again."""
        folders_at = -math.inf
        while True:
            now, is_watched = time.monotonic(), bool(self._pages or self.options.webhooks)
            if now - folders_at >= (_SCAN_S if is_watched else _IDLE_S):
                folders_at = now
                if self._scan is None and (now - self._scanned_at >= _WHOLE_SCAN_S or self.index.has_new_folders()):
                    self._scan = asyncio.create_task(self._scan_all())
            async with self._index_lock:
                self._look()
            timer = asyncio.get_running_loop().call_later(_LIVE_S if is_watched else _IDLE_S, self._is_due.set)
            await self._is_due.wait()  # or a page opens, and is not kept waiting
            timer.cancel()
            self._is_due.clear()

    def _look(self) -> None:
        """Look at runs that train and at logs that are followed: a few small reads, cheaper than a thread."""
        before, grown = self.index.version, set[str]()
        with self._telling_failures():
            grown = self.index.look_at_live(self._watches)
            if self.index.version != before:
                self._raise_alerts()
        if self.index.version != before or time.monotonic() - self._woken_at >= _PING_S:
            self._wake()
        elif grown:
            self._wake(grown)

    async def _rescan(self) -> None:
        """Look at all folders, from now on."""
        if self._scan is not None:
            await asyncio.shield(self._scan)  # which may have passed what is asked for
        self._scan = self._scan or asyncio.create_task(self._scan_all())
        await asyncio.shield(self._scan)

    async def _scan_all(self) -> None:
        """Look at all folders, in a thread; between two parts of it others look at the runs that train."""

        def part() -> bool:
            ends = time.monotonic() + _SCAN_PART_S
            return all(time.monotonic() < ends for _ in steps)

        try:
            with self._telling_failures():
                steps, is_through = self.index.scanning(), False
                while not is_through:
                    async with self._index_lock:
                        is_through = await asyncio.get_running_loop().run_in_executor(self._scanner, part)
                    self._wake()  # for logs that grew as well, which no row may tell
                    self._end_part()
                    if self.index.rows:
                        try:
                            await asyncio.wait_for(self._is_opened.wait(), _OPENING_S)
                        except TimeoutError:  # the page is hidden, or gone: no other part waits for it
                            self._is_opened.set()
                self._scanned_at = time.monotonic()
                self._raise_alerts()
        finally:
            self._scan = None
            self._end_part()
        self._is_scanned.set()
        await asyncio.get_running_loop().run_in_executor(self._scanner, _load_views)

    def _end_part(self) -> None:
        self._next_part.set()
        self._next_part = asyncio.Event()

    @contextlib.contextmanager
    def _telling_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001 - a disk that fails now may answer at the next look; pages must not freeze
            _log.exception("the folders of runs could not be looked at")
            text = "The folders could not be looked at; the server's log says why."
            if text not in self.index.problems:  # until a look succeeds
                self.index.problems.append(text)
            self.index.is_whole = True  # what was read is shown, and what was wrong

    def _wake(self, runs: Container[str | None] | None = None) -> None:
        """Let all streams see what is new, or those that follow one of some runs."""
        self._woken_at = self._woken_at if runs else time.monotonic()
        for news, run in self._pages.items():
            if runs is None or run in runs:
                news.set()

    def end_streams(self) -> None:
        """Let all streams end, which else would go on for as long as pages are open."""
        self._is_ending = True
        self._wake()

    def _raise_alerts(self) -> None:
        at = self.index.version
        rows, removed = self.index.changed_since(self._announced)
        self._announced = at
        for row in rows:
            if (before := self._documents.get(row.id)) is not None:
                for alert in alerts_of(before, row.document, self.options.budget_usd):
                    self._alerts = [*self._alerts[-99:], (self._newest_alert() + 1, alert)]
                    for address in self.options.webhooks:
                        threading.Thread(target=send, args=(alert, address), daemon=True).start()
            self._documents[row.id] = row.document
        for gone in removed:
            self._documents.pop(gone, None)

    def _newest_alert(self) -> int:
        """The number of the newest alert; 0 if there was none."""
        return self._alerts[-1][0] if self._alerts else 0

    # ----------------------------------------------------------------------------------------------------------- pages

    async def _page(self, _: Request) -> Response:
        self._is_opened.clear()
        return HTMLResponse(_SHELL, headers={"content-security-policy": content_policy()})

    async def _runs(self, request: Request) -> Response:
        """All rows; with `part`, while the folders are looked at for the first time, those that are there by now."""
        index = self.index
        if "part" not in request.query_params:
            self._is_opened.set()
            await self._is_scanned.wait()
        while not (index.rows or self._is_scanned.is_set()):
            await self._next_part.wait()
        return _json(
            {
                "epoch": self.epoch,
                "version": index.version,
                "rows": [row.document for row in list(index.rows.values())[:_MOST_ROWS]],
                "problems": index.problems,
                "is_whole": index.is_whole,
                "control": self.options.allows_changes,
                "roots": [str(root) for root in index.roots],
                "studies": sorted(index.studies),
                "services": len(self.options.services),
            }
        )

    async def _select(self, request: Request) -> Response:
        """Ids of the runs of which all conditions hold, in the order of `sort`; or what is wrong with them."""
        where, sort = request.query_params.get("where", ""), request.query_params.get("sort") or None
        values = {row.id: row.values for row in list(self.index.rows.values())}
        return _json(selected_ids(values, where=where, sort=sort))

    def _in_thread(self, maker: Callable[[], Callable[..., Any]], *names: str) -> Callable[[Request], Any]:
        """A route of what `maker()`, which may have to be imported, makes of the index and of some query parameters."""

        async def route(request: Request) -> Response:
            await self._is_scanned.wait()
            values = [request.query_params.get(name, "") for name in names]
            return _json(await run_in_threadpool(lambda: maker()(self.index, *values)))

        return route

    async def _check(self, request: Request) -> Response:
        check = request.query_params.get("check", "")
        html = await run_in_threadpool(lambda: web.other_views.check_html(self.index, check))
        return Response(html, media_type="text/plain")

    async def _services(self, _: Request) -> Response:
        if time.monotonic() - self._services_asked >= _SERVICES_S * 0.9:
            self._services_asked = time.monotonic()
            await ask_all(self.options.services)
        return _json({"services": [service.document() for service in self.options.services]})

    async def _pool(self, _: Request) -> Response:
        pool = self.options.pool
        return _json({"is_configured": False} if pool is None else {"is_configured": True, **await pool.document()})

    async def _compare(self, request: Request) -> Response:
        await self._is_scanned.wait()
        rows = [self.index.rows[run] for run in request.query_params.getlist("run")[:32] if run in self.index.rows]
        return _json(await run_in_threadpool(web.run_view.compare_document, rows))

    # ------------------------------------------------------------------------------------------------------- of a run

    async def _row(self, request: Request) -> Row:
        """The run that a request names: only what the index found can be named, if need be just now."""
        run = request.query_params.get("run", "")
        self._is_opened.set()
        while run not in self.index.rows and self._scan is not None:
            await self._next_part.wait()  # as when the page's server has just been started
        if run not in self.index.rows:
            await self._rescan()
        if run not in self.index.rows:
            raise BadRun(f"there is no run {short(run, 80)!r} here", remedy="It may have been moved or removed.")
        return self.index.rows[run]

    async def _log(self, row: Row) -> tuple[RunLog, bool]:
        """The run's log, read to its end if that is short work; whether it was."""
        self._logs[row.id] = log = self._logs.pop(row.id, None) or web.run_log.RunLog(row.root, row.name)
        while len(self._logs) > _MOST_LOGS:
            del self._logs[next(iter(self._logs))]

        def read(most: int) -> None:
            with log.lock, contextlib.suppress(OSError):
                log.read(most)

        if row.id not in self._reading:
            await asyncio.to_thread(read, _AT_ONCE_BYTES)
            if not log.is_whole:
                self._reading[row.id] = asyncio.create_task(self._read_on(row, log, read))
        return log, row.id not in self._reading

    async def _read_on(self, row: Row, log: RunLog, read: Callable[[int], None]) -> None:
        """Read a long log to its end, and let the pages know."""
        try:
            await asyncio.sleep(_PREVIEW_S)
            while not log.is_whole and row.id in self._logs:
                before = log.offset
                await asyncio.to_thread(read, _AT_ONCE_BYTES)
                if log.offset == before:
                    break
        finally:
            self._reading.pop(row.id, None)
            if row.id in self._watches:
                self._watches[row.id].num_read += 1
                self._wake({row.id})

    async def _run(self, row: Row, _: Request) -> Any:
        log, _is_whole = await self._log(row)
        return await asyncio.to_thread(web.run_view.run_document, row, log)

    async def _series(self, row: Row, request: Request) -> Any:
        log, is_whole = await self._log(row)
        query = request.query_params
        preview = None if is_whole else await asyncio.to_thread(web.run_view.preview_of, row)

        def number(name: str) -> float | None:
            try:
                return float(query[name]) if query.get(name) else None
            except ValueError:
                raise BadRun(f"{name} is no number") from None

        start, end = number("from"), number("to")
        px = int(min(4000, max(50, number("px") or 1000)))
        return await asyncio.to_thread(
            web.run_view.series_document,
            row,
            log,
            preview=preview,
            over=query.get("over", "samples"),
            between=(-math.inf if start is None else start, math.inf if end is None else end),
            px=px,
            scalars=query.getlist("scalar")[:200],
        )

    async def _confusion(self, row: Row, _: Request) -> Any:
        return await asyncio.to_thread(lambda: web.run_view.confusion(row))

    async def _sections(self, request: Request) -> Response:
        row = await self._row(request)
        log, is_whole = await self._log(row)
        if not is_whole:
            raise BadRun("the run's log is still being read")
        return Response(await asyncio.to_thread(web.run_view.sections_html, row, log), media_type="text/plain")

    async def _picture(self, request: Request) -> Response:
        row = await self._row(request)
        log, _ = await self._log(row)
        content = await asyncio.to_thread(web.run_view.picture_of, row, log, request.query_params.get("file", ""))
        return Response(content, media_type="image/png", headers={"cache-control": "private, max-age=3600"})

    async def _do(self, request: Request) -> Response:
        """Stop, resume, fork or annotate a run; `Access` has checked that changes are allowed."""
        row, what = await self._row(request), request.path_params["what"]
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > 64 * 1024:
                raise BadRun("the request is larger than 64 KiB")
        given = orjson.loads(bytes(body)) if body else {}
        said = "done"
        if what == "stop":
            said = web.control.stop(row)
        elif what in ("resume", "fork"):
            said = await asyncio.to_thread(web.control.restart, row, is_fork=what == "fork")
        elif what == "annotate" and isinstance(given, dict):
            web.control.annotate(row, given)
        else:
            raise BadRun(f"there is nothing like {short(what, 40)!r} to do")
        await self._rescan()
        return _json({"said": said})

    # --------------------------------------------------------------------------------------------------------- streams

    async def _events(self, request: Request) -> Response:
        """A stream: `rows` that changed, `alert`s, and with `run` the `events` of its log from an offset on."""
        self._is_opened.set()
        query = request.query_params
        run = query.get("run")
        row = await self._row(request) if run else None
        last = request.headers.get("last-event-id", "") or query.get("from", "0")
        offset = int(last) if last.isdigit() and len(last) < 19 else 0
        since = query.get("since", "")
        epoch, _, version = since.partition(".")
        known = int(version) if epoch == self.epoch and version.isdigit() and len(version) < 19 else -1
        stream = self._stream(row, query.get("log", ""), offset, known)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def _stream(self, row: Row | None, log: str, offset: int, version: int) -> AsyncIterator[bytes]:
        """What is new at each look, in one piece.

        It is of the rows since `version` (-1: all of them), of the alerts, and of `row`'s log from byte `offset` of the
        file `log` on. Where that fails the stream ends, and the page asks for another.
        """
        news, watch = asyncio.Event(), _Watch()
        self._pages[news] = None if row is None else row.id
        self._is_due.set()
        if row is not None:
            watch = self._watches.setdefault(row.id, watch)
            watch.followers += 1
        alerted, num_read, sent_at = self._newest_alert(), watch.num_read, time.monotonic()
        seen: tuple[str, int, int] | None = None
        try:
            yield b"retry: 1000\n\n"
            while not self._is_ending:
                news.clear()  # before the look: what comes while a slow page is sent to is seen at once
                pieces, version = self._news_of_rows(row, version)
                pieces += [_event("alert", alert.document()) for number, alert in self._alerts if number > alerted]
                alerted = self._newest_alert()
                if row is not None:
                    row = self.index.rows.get(row.id, row)  # one that went and came is another row
                    tail = row.tail
                    if (tail.log, tail.end, watch.num_read) != seen:
                        piece, offset, log, is_refetch = watch.new_lines(row, tail, log, offset)
                        if is_refetch or num_read != watch.num_read:
                            piece = _event("refetch", {"offset": offset, "log": log}, offset)
                        pieces.append(piece)
                        num_read = watch.num_read
                        seen = (tail.log, tail.end, num_read)
                if not any(pieces) and time.monotonic() - sent_at >= _PING_S:
                    pieces = [b": \n\n"]  # so that a broken line is noticed
                if any(pieces):
                    yield b"".join(pieces)
                    sent_at = time.monotonic()
                await news.wait()
        except Exception:  # noqa: BLE001 - records may hold anything, and disks fail
            _log.exception("a stream of events ends")
        finally:
            del self._pages[news]
            watch.followers -= 1
            if row is not None and not watch.followers:
                self._watches.pop(row.id, None)

    def _news_of_rows(self, only: Row | None, version: int) -> tuple[list[bytes], int]:
        """Rows that changed since `version`, as an event if there are any, and the version after them."""
        at = self.index.version  # before the rows: a scan in a thread may change some until they are sent
        if at == version:
            return [], at
        if self._rows_events[0] != at:
            self._rows_events = at, {}
        made, key = self._rows_events[1], (version, None if only is None else only.id)
        if key not in made:
            rows, removed = self.index.changed_since(version)
            document: dict[str, JSON] = {
                "epoch": self.epoch,
                "version": at,
                "rows": [row.document for row in rows if only is None or row.id == only.id],
                "removed": [name for name in removed if only is None or name == only.id],
                "problems": self.index.problems,
                "is_whole": self.index.is_whole,
            }
            is_news = document["rows"] or document["removed"] or version < max(0, self.index.problems_version)
            made[key] = _event("rows", document) if is_news else b""
        return [made[key]], at


def serve(options: UiOptions, listener: socket.socket) -> None:
    """Serve the page at `listener`, which is bound to this machine's loopback, until SIGINT or SIGTERM."""
    sys.setswitchinterval(_SWITCH_S)
    page = Ui(options)
    config = uvicorn.Config(
        page.application(),
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="on",
        timeout_graceful_shutdown=1,
        http="httptools",
        ws="none",
        h11_max_incomplete_event_size=16 * 1024,
    )
    AnnouncedServer(config, leave=page.end_streams).run(sockets=[listener])


def _new_lines(row: Row, tail: Tail, log: str, offset: int) -> tuple[bytes, int, str, bool]:
    """A log from byte `offset` to the end of `tail` as events; that end, of which file, and whether to fetch again."""
    if not tail.log or (log and log != tail.log):
        return b"", 0, tail.log, bool(log)
    if offset > tail.end:  # what a page fetched was read later than `tail`, unless the log has been cut
        is_cut = _size(row) < offset
        return b"", 0 if is_cut else offset, tail.log, is_cut
    if tail.end - offset > _STREAM_BYTES:
        return b"", tail.end, tail.log, True
    lines = tail.lines[offset - tail.start :] if offset >= tail.start else _lines_before(row, tail, offset)
    parts: list[bytes] = []
    for line in lines.split(b"\n")[:-1]:
        offset += len(line) + 1
        if (document := web.run_log.line_document(line, offset)) is not None:
            parts.append(_event("event", document, offset))
    return b"".join(parts), offset, tail.log, False


def _size(row: Row) -> int:
    """Bytes of the row's log; 0 if there is none."""
    try:
        return os.lstat(row.path / EVENTS).st_size
    except OSError:
        return 0


def _lines_before(row: Row, tail: Tail, offset: int) -> bytes:
    """The log from byte `offset` to the end of `tail`, for a page that is behind; nothing if it is another file now."""
    try:
        descriptor = open_below(row.root, f"{row.name}/{EVENTS}")
    except OSError:
        return b""
    try:
        status = os.fstat(descriptor)
        is_same = f"{status.st_dev}.{status.st_ino}" == tail.log
        return os.pread(descriptor, tail.end - offset, offset) if is_same else b""
    finally:
        os.close(descriptor)


def _event(kind: str, document: JSON, offset: int | None = None) -> bytes:
    head = b"" if offset is None else b"id: %d\n" % offset
    return b"%sevent: %s\ndata: %s\n\n" % (head, kind.encode(), orjson.dumps(document))


def _json(document: Any) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")


async def _failure(_: Request, problem: Exception) -> Response:
    """An error as the command line would show it: what is wrong, and what to do."""
    if isinstance(problem, StokerError):
        document = {"error": short(problem.message, 1000), "remedy": short(problem.remedy or "", 400)}
        return Response(orjson.dumps(document), problem.http_status, media_type="application/json")
    status = problem.status_code if isinstance(problem, HTTPException) else 500
    words = problem.detail if isinstance(problem, HTTPException) else f"{type(problem).__name__}: {problem}"
    return Response(orjson.dumps({"error": short(words, 400)}), status, media_type="application/json")


_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_SHELL = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    '<meta name="color-scheme" content="light dark">\n'
    "<title>Stoker</title>\n"
    + "".join(
        f'<link rel="stylesheet" href="/static/{name}.css">\n'
        for name in ("colours", "page", "data_page", "vendor/uPlot", "run", "ui")
    )
    + '<link rel="icon" href="/static/icon.svg">\n'
    + f"</head>\n<body>\n<script>{LOADER}</script>\n</body>\n</html>\n"
)


def _load_views() -> None:
    """Import what the page of a run needs before one is opened; see `stoker.web`."""
    for module in ("run_view", "other_views"):
        importlib.import_module(f"stoker.web.{module}")


async def _static(request: Request) -> Response:
    """Files of the page: this package's, and the scripts and style sheets that it shares with reports."""
    name = str(request.path_params["name"])
    content = _static_files().get(name)
    if content is None:
        raise HTTPException(404, "there is no such file")
    headers = {"cache-control": "no-cache", "etag": f'"{hashlib.sha256(content.encode()).hexdigest()[:20]}"'}
    if request.headers.get("if-none-match", "").removeprefix("W/") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=_KINDS[Path(name).suffix], headers=headers)


def _static_files() -> dict[str, str]:
    """All files that may be asked for, by name: nothing else is read for a request."""
    if not _FILES:
        for package in ("stoker.reporting", "stoker.web"):
            folder = resources.files(package).joinpath("static")
            for inner, prefix in ((folder, ""), (folder.joinpath("vendor"), "vendor/")):
                for file in inner.iterdir() if inner.is_dir() else ():
                    if file.is_file() and Path(file.name).suffix in _KINDS:
                        _FILES[prefix + file.name] = file.read_text(encoding="utf-8")
        _FILES["colours.css"] = colour_sheet()
    return _FILES


_FILES: dict[str, str] = {}
