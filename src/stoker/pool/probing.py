"""The control plane's side of `joint_probe`: which offers are asked when, with questions that reach all at one moment.

What: an agent that looks for work learns that its devices are to be probed, and then sends its answers, one request
each, whose reply is the next question (`ProbeChannel.exchange`). A thread asks all of a probe at once, times them with
the clock of this process, and checks their rows (`hardware_proof`).
Costs: one probe at a time; a thread for each device of it, of which `_MOST_CHECKED` have their rows sent and checked at
a time: so a stranger's devices hold 200 MiB of answers in this process's memory at most.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import orjson

from stoker.errors import PlaceFailed, StokerError, first_line
from stoker.pool.events import Probed, ProbeTimes, Refused
from stoker.pool.hardware_proof import HardwareProof, probed_bytes, prove_hardware, shape_of
from stoker.pool.joint_probe import ROUNDS, is_never_in_time, probed_devices, suspects, to_screen
from stoker.pool.state import ListedOffer, State

_log = logging.getLogger(__name__)
_COMES_S = 60.0
"""Time for agents to come: they load PyTorch first [s]."""
ANSWER_S = 90.0
"""Time for an answer to a question, its way here included [s]."""
_NUM_ROWS = 8
_MOST_CHECKED = 8
"""Devices whose rows are sent, kept and checked at a time; the questions that are timed reach all at one moment."""
_MOST_ROWS_BYTES, _MOST_SAID_BYTES = 24 << 20, 16 << 10
"""Largest answer with rows, eight of a product in base64 and two lists of row digests; and of any other [bytes]."""
_MOST_VALUES = 100
"""Values of a large answer: it has three, each a text in base64."""
_WAIT_S = 20.0
_MOST_PAUSED_S = 0.5
"""Time of a probe in which the control plane was away, at most [s]."""
_LEFT_S = 3600.0
"""So long an agent is not asked that did not come, did not answer, or never in time: others would wait again [s]."""


def read_answer(content: bytes | bytearray) -> dict[str, Any]:
    """The document of an answer; {} for what is none, and for a large one that would take far more memory than it has.

    A list of lists takes thirty times its text, and text with one character beyond ASCII four times.

    >>> read_answer(b'{"root": "ab"}'), read_answer(b"[1]")
    ({'root': 'ab'}, {})
    """
    if len(content) > _MOST_SAID_BYTES:
        is_flat = content.count(b",") < _MOST_VALUES
        if not is_flat or b"\\" in content or not content.isascii():
            return {}
    try:
        answer = orjson.loads(content)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


class ProbeChannel:
    """Questions to one device of an offer, and its answers.

    Attributes:
        has_come: set once its agent is ready, or the channel is over.
        is_over: nothing more is asked.
        is_silent: a question was not answered.
        is_taking: the body of an answer is being read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.has_come = threading.Event()
        self.is_over = self.is_silent = self.is_taking = False
        self._loop, self._news = loop, asyncio.Event()
        self._step, self._question = 0, dict[str, Any]()
        self._answer: Future[dict[str, Any]] = Future()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Put a question and wait for the answer; not in the loop's thread.

        Raises:
            PlaceFailed: there is none in time.
        """
        answer: Future[dict[str, Any]] = Future()
        self._loop.call_soon_threadsafe(self._put, question, answer)
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            self.is_silent = True
            raise PlaceFailed(f"no answer within {ANSWER_S:.0f} s") from None

    def _put(self, question: dict[str, Any], answer: Future[dict[str, Any]]) -> None:
        self._step, self._question, self._answer = self._step + 1, question, answer
        if self.is_over:
            answer.set_exception(PlaceFailed("the agent has left the probe"))
        self._news.set()

    def end(self) -> None:
        """Nothing more is asked; what waits for an answer gets none. In the loop's thread."""
        self.is_over = True
        self.has_come.set()
        if not self._answer.done():
            self._answer.set_exception(PlaceFailed("the agent has left the probe"))
        self._news.set()

    def has_asked(self, step: int) -> bool:
        """Whether question number `step` was put; 0 is the agent's coming."""
        return step <= self._step

    @property
    def most_bytes(self) -> int:
        """Largest answer to the present question [bytes]."""
        return _MOST_ROWS_BYTES if self._question.get("ask") == "rows" else _MOST_SAID_BYTES

    def awaits(self, step: int) -> bool:
        """Whether question number `step` is the last one, and has no answer yet."""
        return step == self._step and not self._answer.done()

    async def exchange(self, step: int, answer: dict[str, Any]) -> dict[str, Any]:
        """Take the answer to question number `step`, and wait for the next one; `question` is None: ask again."""
        if step == 0:
            self.has_come.set()
        elif step == self._step:
            try:
                self._answer.set_result(answer)
            except InvalidStateError:  # sent twice, or too late
                _log.info("an answer to question %d of a probe was there already", step)
        try:
            async with asyncio.timeout(_WAIT_S):
                while self._step <= step and not self.is_over:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return {"step": step, "question": None}
        return {"over": True} if self.is_over else {"step": self._step, "question": self._question}


class Prober:
    """Probes offers now and then, in a pool's control plane.

    Args:
        state: of the pool.
        submit: puts what was found into the log.
        every_s: time between two screens [s].
        paused_s: for how long the control plane was paused, so far [s]: a probe in such a time says nothing.
        prove: asks one device and times it.
    """

    def __init__(
        self,
        state: State,
        submit: Callable[[Probed], Coroutine[Any, Any, object]],
        every_s: float,
        paused_s: Callable[[], float] = lambda: 0.0,
        prove: Callable[..., HardwareProof] = prove_hardware,
    ) -> None:
        self._state, self._submit, self._every_s, self._prove = state, submit, every_s, prove
        self._paused_s = paused_s
        self.networks: dict[str, str] = {}
        """Addresses of the agents that take part, by key."""
        self._channels: dict[tuple[str, int], ProbeChannel] = {}
        self._probe_id = ""
        self._next_s = time.monotonic() + every_s
        self._seen_s: dict[str, float] = {}
        self._left_until_s: dict[str, float] = {}
        """Until when an agent is not asked, by key."""
        self._suspects: deque[tuple[str, str]] = deque()
        self._chance = random.SystemRandom()
        self._task: asyncio.Task[None] | None = None

    def asked(self, key: str) -> list[dict[str, Any]]:
        """Devices of an agent that are wanted now, for the answer to its look for work."""
        return [
            {"probe_id": self._probe_id, "offer_id": offer_id, "device": number}
            for (offer_id, number), channel in self._channels.items()
            if not channel.has_come.is_set() and self._agent_of(offer_id) == key
        ]

    def channel(self, probe_id: str, offer_id: str, device: int, key: str) -> ProbeChannel:
        """Where an agent answers.

        Raises:
            Refused: there is no such probe now, or it is of another agent.
        """
        channel = self._channels.get((offer_id, device))
        if channel is None or probe_id != self._probe_id or self._agent_of(offer_id) != key:
            raise Refused(f"there is no probe {probe_id[:40]!r} of {offer_id[:64]!r} now")
        return channel

    def _agent_of(self, offer_id: str) -> str:
        listed = self._state.offers.get(offer_id)
        return "" if listed is None else listed.agent

    def look(self, idle: Callable[[], Iterable[ListedOffer]], wake: Callable[[str], None]) -> None:
        """Begin a probe if one is due.

        Args:
            idle: offers whose agent is there, takes part, and has nothing else to do.
            wake: lets an agent know that it is asked for.
        """
        is_busy = self._task is not None and not self._task.done()
        if is_busy or not (self._suspects or time.monotonic() >= self._next_s):
            return
        now_s = time.monotonic()
        self._left_until_s = {key: until_s for key, until_s in self._left_until_s.items() if until_s > now_s}
        able = {one.offer.offer_id: one for one in idle() if one.agent not in self._left_until_s}
        agents = {one.agent for one in able.values()}
        self.networks = {key: network for key, network in self.networks.items() if key in agents}  # keys cost nothing
        found, rounds = list[ListedOffer](), ROUNDS
        while self._suspects and not found:
            pair = self._suspects.popleft()
            found = [able[name] for name in pair] if set(pair) <= able.keys() else []
        if not found and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            found, rounds = self._due(able)
        if found:
            self._begin(found, rounds, wake)

    def _due(self, able: Mapping[str, ListedOffer]) -> tuple[list[ListedOffer], int]:
        """A screen; or of those that clashed, a pair again, which marks it or frees it."""
        of_agent: dict[str, list[ListedOffer]] = defaultdict(list)
        for one in able.values():
            of_agent[one.agent].append(one)
        pairs, now_s = list[list[ListedOffer]](), time.time()
        for (late, with_agent), clash in self._state.clashes.items():
            # Other offers of theirs say nothing of it while those that clashed stand, be they idle or not.
            is_of_those = clash.is_of_standing(self._state.offers, now_s)
            pairs += [
                [one, other]
                for one in of_agent[late]
                for other in of_agent[with_agent]
                if one is not other and (not is_of_those or clash.offers == {one.offer.offer_id, other.offer.offer_id})
            ]
        screen = to_screen([*able.values()], self.networks, self._seen_s, self._chance)
        if pairs and (not screen or self._chance.random() < 0.5):
            return self._chance.choice(pairs), ROUNDS
        return screen, 1

    def _begin(self, offers: Sequence[ListedOffer], rounds: int, wake: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self._probe_id = secrets.token_hex(8)
        self._channels = {
            (one.offer.offer_id, number): ProbeChannel(loop) for one in offers for number in range(probed_devices(one))
        }
        self._seen_s |= dict.fromkeys((one.offer.offer_id for one in offers), time.monotonic())
        self._task = asyncio.create_task(self._run(offers, rounds))
        for one in offers:
            wake(one.agent)

    async def _run(self, offers: Sequence[ListedOffer], rounds: int) -> None:
        body, paused_s, is_void = None, self._paused_s(), False
        try:
            body = await asyncio.to_thread(self._made, offers, rounds)
            is_void = self._paused_s() - paused_s > _MOST_PAUSED_S
            if is_void:  # answers came in time, and were not read
                body = None
                _log.info("a probe came to nothing: this pool was away")
            elif body is None:
                _log.info("a probe came to nothing: too few came, answered, and kept to their claims")
            else:
                await self._submit(body)
                if rounds == 1:
                    self._suspects.extend(pair for pair in suspects(body) if pair not in self._suspects)
                else:
                    self._suspects.extendleft(self._again(body))
        except StokerError as problem:  # such as an offer that was withdrawn in between
            _log.info("a probe came to nothing: %s", first_line(problem))
        except Exception:  # noqa: BLE001 - the pool goes on; the fault is logged
            _log.exception("a probe failed")
        finally:
            agents = {one.offer.offer_id: one.agent for one in offers}
            left = [] if body is None else [one.agent for one in body.offers if is_never_in_time(one)]
            for (offer_id, _), channel in self._channels.items():
                if not is_void and (channel.is_silent or not channel.has_come.is_set()):
                    left.append(agents[offer_id])
                channel.end()
            self._left_until_s |= dict.fromkeys(left, time.monotonic() + _LEFT_S)
            self._channels = {}

    def _again(self, body: Probed) -> list[tuple[str, str]]:
        """A pair that has clashed for the first time is probed once more."""
        one, other = body.offers
        agents = ((one.agent, other.agent), (other.agent, one.agent))
        found = [clash for pair in agents if (clash := self._state.clashes.get(pair)) is not None]
        names = {one.offer_id, other.offer_id}
        is_first = max((clash.count for clash in found if clash.offers == names), default=0) == 1
        return [(one.offer_id, other.offer_id)] if is_first else []

    def close(self) -> None:
        """End what goes on."""
        for channel in self._channels.values():
            channel.end()
        if self._task is not None:
            self._task.cancel()

    # ---------------------------------------------------------------------------------------------- in another thread

    def _made(self, offers: Sequence[ListedOffer], rounds: int) -> Probed | None:
        """Ask those that come; None: of a screen fewer than two gave answers, of a pair not both."""
        until = time.monotonic() + _COMES_S
        channels = dict(self._channels)
        for channel in channels.values():
            channel.has_come.wait(max(0.0, until - time.monotonic()))
        absent = {name for (name, _), one in channels.items() if one.is_over or not one.has_come.is_set()}
        asked = [one for one in offers if one.offer.offer_id not in absent]
        least = 2 if rounds == 1 else len(offers)
        if len(asked) < least:
            return None
        alone: dict[str, list[float]] = {one.offer.offer_id: [] for one in asked}
        together: dict[str, list[float]] = {one.offer.offer_id: [] for one in asked}
        for _ in range(rounds):
            turns: list[tuple[ListedOffer, ...]] = [(one,) for one in asked] if rounds > 1 else []
            for group in self._chance.sample([*turns, tuple(asked)], len(turns) + 1):
                found = self._asked_at_once(group, channels)
                if rounds > 1 and len(found) < len(group):
                    return None
                for offer_id, time_s in found.items():
                    (together if len(group) == len(asked) else alone)[offer_id].append(time_s)
        asked = [one for one in asked if together[one.offer.offer_id] and self._claims_as(one)]
        if len(asked) < least:
            return None
        return Probed(
            offers=tuple(
                ProbeTimes(
                    offer_id=one.offer.offer_id,
                    agent=one.agent,
                    claimed_s=claimed_s(one),
                    alone_s=tuple(alone[one.offer.offer_id]),
                    together_s=tuple(together[one.offer.offer_id]),
                )
                for one in asked
            )
        )

    def _claims_as(self, listed: ListedOffer) -> bool:
        """Whether an offer says of its device what it said when it was asked: the times are held against that."""
        now, then = self._state.offers.get(listed.offer.offer_id), listed.offer
        return now is not None and (now.offer.device, now.offer.measured) == (then.device, then.measured)

    def _asked_at_once(
        self, offers: Sequence[ListedOffer], channels: Mapping[tuple[str, int], ProbeChannel]
    ) -> dict[str, float]:
        """Time of each offer's slowest device, by name; 0.0: one gave no right answer. Who was silent is left out."""
        names = {one.offer.offer_id: one for one in offers}
        asked = [(place, channel) for place, channel in channels.items() if place[0] in names]

        turns = threading.Semaphore(_MOST_CHECKED)

        def product_s(place: tuple[str, int], channel: ProbeChannel) -> float | None:
            num_bytes = bytes_of(names[place[0]])
            with ExitStack() as turn:

                def ask(question: dict[str, Any]) -> dict[str, Any]:
                    if question.get("ask") == "rows":  # the last one, which is not timed: kept until it was checked
                        turn.enter_context(turns)
                    return channel.ask(question)

                try:
                    proof = self._prove(ask, memory_bytes=num_bytes, num_rows=_NUM_ROWS)
                except PlaceFailed as problem:
                    _log.info("%s is left out of a probe: %s", place[0], first_line(problem))
                    return None
            return round(proof.product_s, 3) if proof.is_passed else 0.0

        with ThreadPoolExecutor(len(asked), thread_name_prefix="probe") as threads:
            answers = [*threads.map(lambda one: product_s(*one), asked)]
        times: dict[str, list[float | None]] = defaultdict(list)
        for (place, _), time_s in zip(asked, answers, strict=True):
            times[place[0]].append(time_s)
        return {
            name: max(found) if all(found) else 0.0
            for name, all_found in times.items()
            if len(found := [time_s for time_s in all_found if time_s is not None]) == len(all_found)
        }


def bytes_of(listed: ListedOffer) -> int:
    """Memory that an offer's device is asked to fill [bytes]."""
    offer = listed.offer
    return probed_bytes(offer.device.memory_bytes, is_cpu=offer.device.kind == "cpu")


def claimed_s(listed: ListedOffer) -> float:
    """What the product takes by the rate that an offer states [s]; 0.0: it states none."""
    rate = listed.offer.measured.fp32_flop_per_s
    n, k = shape_of(bytes_of(listed))
    return round(2.0 * n * n * k / rate, 3) if rate else 0.0
