"""The log: every event in the order in which it counted, in one SQLite file; and its audit.

Rows are only ever added (triggers refuse the rest), each with the canonical JSON of its event and that text's hash. An
append that moves money is on the disk when it returns; beats and offers survive the death of the process, and are on
the disk with the next one that does. `audit` trusts nothing but the pool's key in the first event.

Source: SQLite, "Write-Ahead Logging": WAL does not work over a network file system; `synchronous=FULL` syncs the WAL
at each commit, `NORMAL` at checkpoints.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import BadRun
from stoker.pool.events import Event, Refused, canonical, read_event, sha256
from stoker.pool.rules import apply
from stoker.pool.state import State
from stoker.records.codec import parsed
from stoker.store import files
from stoker.store.disk_errors import disk_errors
from stoker.store.files import make_directories
from stoker.store.locations import is_on_network

_APPLICATION = 0x53746B50  # "StkP"
_NOT_MONEY = frozenset({"beat", "offered", "withdrawn"})
_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, actor TEXT NOT NULL, nonce TEXT NOT NULL, document TEXT NOT NULL, hash TEXT NOT NULL,
    UNIQUE (actor, nonce)
) STRICT;
CREATE TRIGGER IF NOT EXISTS no_update BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'the log only grows'); END;
CREATE TRIGGER IF NOT EXISTS no_delete BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'the log only grows'); END;
"""


class EventLog:
    """The log of a control plane, open for appending by this process alone.

    Args:
        path: of the SQLite file; made if it is not there.

    Raises:
        BadRun: it is on a network file system, is in use by another process, or is no log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if is_on_network(path.parent):
            raise BadRun(
                f"the log {path} would be on a network file system, where SQLite's log can be damaged",
                remedy="Name a folder on a local disk with --folder.",
            )
        with disk_errors(path, "the pool's log", error=BadRun, option="--folder DIR"):
            make_directories(path.parent)
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not files.try_lock(self._lock):
                raise BadRun(f"another process serves the pool in {path.parent}", remedy="Stop it, or --folder DIR.")
            self._sql = _connected(path)
            self._sql.executescript("PRAGMA journal_mode=WAL;" + _SCHEMA)
            self._sql.execute(f"PRAGMA application_id={_APPLICATION}")
        except sqlite3.Error as problem:
            os.close(self._lock)
            raise BadRun(
                f"the log {path} cannot be used: {problem}",
                remedy=f"stoker pool audit {path} says what is damaged; go on from a copy.",
            ) from problem
        except BaseException:
            os.close(self._lock)
            raise

    def append(self, event: Event) -> None:
        """Add an event; once this returns, it survives the death of this process, and with money a power cut.

        Raises:
            BadRun: it cannot be written (a full disk, …); the log is as before.
        """
        text = canonical(event.document())
        row = (event.seq, event.actor, event.draft.nonce, text.decode(), sha256(text))
        try:
            self._sql.execute(f"PRAGMA synchronous={'NORMAL' if event.kind in _NOT_MONEY else 'FULL'}")
            self._sql.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", row)
        except sqlite3.Error as problem:
            raise BadRun(
                f"event {event.seq} cannot be written to {self.path}: {problem}",
                remedy="Nothing was changed by it. Is the disk full? The same request can be sent again.",
            ) from problem

    def find(self, actor: str, nonce: str) -> Event | None:
        """The event of that actor with that nonce, if the log has it."""
        row = self._sql.execute("SELECT document FROM events WHERE actor=? AND nonce=?", (actor, nonce)).fetchone()
        return None if row is None else read_event(parsed(row[0]))

    def documents(self, after: int, most: int = 1000) -> list[str]:
        """The texts of events after number `after`."""
        found = self._sql.execute("SELECT document FROM events WHERE seq>? ORDER BY seq LIMIT ?", (after, most))
        return [row[0] for row in found]

    def replay(self) -> State:
        """The state after all events; hashes and legality are checked, signatures are not (see `audit`).

        Raises:
            BadRun: an event does not follow from those before; its number is named.
        """
        state = State()
        found = audit(self.path, checks_signatures=False, state=state)
        if found.problem:
            raise BadRun(
                f"the log {self.path} is damaged: {found.problem}",
                remedy="Nothing was changed. Put back a copy of the log, and start again.",
            )
        return state

    def close(self) -> None:
        """Close the file, and let others open it."""
        self._sql.close()
        os.close(self._lock)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What a replay of a log showed.

    Attributes:
        num_events: events that are right, from the first on.
        head: hash of the last of them.
        problem: what is wrong with the first bad one; "": nothing.
        bad_event: its number; 0: none.
    """

    num_events: int
    head: str
    problem: str = ""
    bad_event: int = 0


def audit(path: Path, *, checks_signatures: bool = True, state: State | None = None, head: str | None = None) -> Audit:
    """Replay a log, and check hashes, signatures, legality and balances of every event.

    Args:
        path: of a log, or of a file with one event a line as `GET /v1/events` has them.
        checks_signatures: whether to check those, and the file's own structure, too (0.1 ms an event).
        state: where the balances end up.
        head: hash of an event that the log must have, from a receipt: a log that was cut short is else as good as new.

    Raises:
        BadRun: the file cannot be read.
    """
    state = State() if state is None else state
    if not path.is_file():
        raise BadRun(f"there is no log {path}")
    problem = _problem(path, state, checks_signatures=checks_signatures, head=head)
    return Audit(num_events=state.seq, head=state.head, problem=problem, bad_event=state.seq + 1 if problem else 0)


def _problem(path: Path, state: State, *, checks_signatures: bool, head: str | None) -> str:
    """What is wrong with a log, of which `state` has taken what is right; "": nothing."""
    has_head = head is None
    try:
        for text in _texts(path, checks_file=checks_signatures):
            if why := _bad(text, state, checks_signatures=checks_signatures):
                return f"event {state.seq + 1}: {why}"
            has_head = has_head or state.head == head
        state.accounts.require_conserved(is_thorough=True)
    except (sqlite3.Error, OSError, Refused) as problem:
        return f"after event {state.seq}: {problem}"
    return "" if has_head else f"no event has the hash {head}: the log was cut short, or is another one"


def _bad(text: str | bytes, state: State, *, checks_signatures: bool) -> str:
    """What is wrong with the next event; "": nothing, and `state` has taken it."""
    try:
        event = read_event(parsed(text))
        if canonical(event.document()) != (text.encode() if isinstance(text, str) else text):
            return "its text is not canonical JSON: it was changed after it was written"
        if checks_signatures and not event.draft.is_signed():
            return f"its signature is not of {event.actor[:12]}…"
        apply(state, event)
    except (Refused, ValueError) as problem:
        return str(problem).split("\n", 1)[0]
    return ""


def _texts(path: Path, *, checks_file: bool) -> Iterable[str | bytes]:
    """The texts of a log, in their order."""
    with path.open("rb") as file:
        is_database = file.read(16) == b"SQLite format 3\0"
    return _rows(path, checks_file=checks_file) if is_database else _lines(path)


def _lines(path: Path) -> Iterator[bytes]:
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        content += b"\n"
    yield from content.split(b"\n")[:-1]


def _rows(path: Path, *, checks_file: bool) -> Iterator[str]:
    sql = _connected(path, is_read_only=True)
    try:
        for number, text, digest in sql.execute("SELECT seq, document, hash FROM events ORDER BY seq"):
            if sha256(text.encode()) != digest:
                raise sqlite3.DatabaseError(f"event {number} and its hash differ")
            yield text
        if checks_file and (fault := sql.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(f"the file is damaged: {fault}")
    finally:
        sql.close()


def _connected(path: Path, *, is_read_only: bool = False) -> sqlite3.Connection:
    """A connection whose every statement is a transaction; threads may take turns with it."""
    name = f"{path.resolve().as_uri()}?mode={'ro' if is_read_only else 'rwc'}"
    return sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False, timeout=10)
