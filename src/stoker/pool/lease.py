"""A lease: one device, lent to one renter for one job; its states, and every legal transition in one table.

```
open → funded → running ⇄ suspect ─┐
          │        │ ↘ reclaiming ─┤
          └────────┴───────────────┴→ closed → disputed → slashed | refunded → final
                                         └───────────────────────────────────→ final
```
`open` lasts no longer than its own event: an offer is taken together with its deposit, or not at all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from stoker.pool.bisection import Bisection, Party
from stoker.pool.events import ContractTerms, Forecast, Refused
from stoker.units import format_seconds

LeaseState = Literal[
    "open", "funded", "running", "suspect", "reclaiming", "closed", "disputed", "slashed", "refunded", "final"
]

BEAT_S = 10.0
"""Time between two beats [s]."""
SUSPECT_S = 2 * BEAT_S
"""Silence after which a lease is suspect [s]."""
LOST_S = 4 * BEAT_S
"""Silence after which a lease may be given up [s]."""
ACCEPT_S = 60.0
"""Time that an agent has to accept [s]."""
MOST_UNSIGNED = 1000
"""Beats that wait to be co-signed at most; of more, the oldest can only be agreed to with a later one."""
MOST_COMMITMENTS = 10_000
"""Blocks of one lease at most."""
MOST_MESSAGES = 10_000
"""Messages that a site sends in one lease at most."""
MOST_BLOCK_S = 300
"""Longest block of a lease that is checked, as its order has it [s]."""
MOST_UNPAID = 3
"""A job that is checked has saved after so many blocks' time, of `MOST_BLOCK_S` at least, or its agent leaves it."""
STALLED_S = 2 * MOST_UNPAID * MOST_BLOCK_S
"""Time on the meter without a block after which the pool ends a lease that is checked [s]: no honest agent would go on
for so long."""
STALLED = "no block was committed for so long that the agent does nothing, or the job"
"""Reason of such a lease."""
USED_UP = "the deposit is used up"
"""Reason of a lease that the pool ends for that."""
VERDICT_S = 600.0
"""Least time that a verifier has for a block, before another one is asked [s]."""
RELEASED = "released: not all sites were accepted in time"
"""Reason of a lease of a gang that was never complete."""
PREEMPTED = "reclaimed for a higher priority"
"""Reason of a lease that makes room for another one; its agent has done nothing."""
SENT_OTHERWISE = "refused: the site has sent another message"
"""How the reason begins of an agent whose machine makes another message than its site has sent before."""
SAVES_NOTHING = "refused: it has saved nothing"
"""How the reason begins of an agent that leaves a job which saves nothing that could be paid."""
WAITED = "refused: it has waited for another site"
"""How the reason begins of an agent that leaves since another site's message does not come."""
LEAST_WAIT_S = 2 * MOST_BLOCK_S
"""Time on the meter without a block after which an agent may leave for that [s], and has no loss in its record."""
MOST_EVIDENCE_BYTES = 1 << 20
"""Largest record of a replay that is kept until its lease is settled [bytes]."""
CLOCK_SLACK_S = 2.0
"""Most that the meter may be ahead of the time since the lease was accepted [s]."""

_STAYS: dict[str, tuple[LeaseState, ...]] = {
    "beat": ("running", "reclaiming"),
    "cosigned": ("running", "suspect", "reclaiming", "closed"),
    "committed": ("running", "suspect", "reclaiming"),
    "sent": ("running", "suspect", "reclaiming"),
    "forwarded": ("funded", "running", "suspect", "reclaiming", "closed", "disputed", "slashed", "refunded"),
    "challenged": ("closed", "disputed"),
    "verdict": ("closed", "disputed"),
    "traced": ("disputed",),
    "supplied": ("disputed",),
    "dismissed": ("disputed",),
}
"""Kinds of events that are taken in these states, and leave a lease in the one that it has."""

TRANSITIONS: dict[tuple[LeaseState, str], LeaseState] = {
    **{(state, kind): state for kind, states in _STAYS.items() for state in states},
    ("open", "opened"): "funded",
    ("funded", "accepted"): "running",
    ("funded", "closed"): "closed",
    ("running", "suspected"): "suspect",
    ("running", "reclaiming"): "reclaiming",
    ("running", "preempting"): "reclaiming",
    ("running", "finished"): "closed",
    ("running", "closed"): "closed",
    ("suspect", "beat"): "running",
    ("suspect", "lost"): "closed",
    ("suspect", "closed"): "closed",
    ("reclaiming", "lost"): "closed",
    ("reclaiming", "finished"): "closed",
    ("reclaiming", "closed"): "closed",
    ("closed", "disputed"): "disputed",
    ("closed", "final"): "final",
    ("disputed", "slashed"): "slashed",
    ("disputed", "refunded"): "refunded",
    ("disputed", "final"): "final",
    ("slashed", "final"): "final",
    ("refunded", "final"): "final",
}
"""(state, kind of event) → state after it. What is not here is refused."""

CHAIN_PREFIX = "chain/"
"""How accounts begin that are addresses on a chain. They go below zero: what they have is in the contract."""

LIVE: frozenset[LeaseState] = frozenset({"open", "funded", "running", "suspect", "reclaiming"})
"""The device is taken."""
METERED: frozenset[LeaseState] = frozenset({"running", "suspect", "reclaiming"})
"""The agent has accepted, and the job runs or may run."""


def run_of(lease_id: str, gang: str) -> str:
    """Name of the run that a lease is of: that of its gang, or what stands before the number in its name.

    >>> run_of("3f-job-17.2", ""), run_of("3f-job-17-s0.2", "3f-job-17")
    ('3f-job-17', '3f-job-17')
    """
    return gang or lease_id.rpartition(".")[0]


def on_chain(address: str) -> str:
    """The account of an address on the chain."""
    return CHAIN_PREFIX + address


@dataclass(frozen=True, kw_only=True)
class Commitment:
    """The state of the run after a block: see `events.Committed`.

    `running_s`: the meter at the last beat before it was committed [s]; `at_s`: when that was [s since 1970].
    """

    block: int
    update: int
    state: str
    blob: str
    seal: str = ""
    running_s: int = 0
    at_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SentMessage:
    """A site's message to the others of its gang: see `events.Sent`."""

    update: int
    fragment: int
    blob: str

    @property
    def place(self) -> tuple[int, int]:
        """Which exchange it is of: update and fragment."""
        return self.update, self.fragment


@dataclass(frozen=True, kw_only=True)
class Challenge:
    """A block to be replayed, and what came of it.

    Attributes:
        fee: what the verifier gets, and once it answered, what it got [micro-credits].
        equal: its verdict; None: not yet.
        made: digest of the state that an unequal replay, or an arbiter, came to; "": not compared by bits.
        since_s: when it was asked for [s since 1970].
        account: that gets the fee.
        update: of an arbiter, the one update of the block that it makes [updates, from 1]; 0: the whole block.
        against: of an arbiter, the verifier whose verdict it settles.
        bisection: of an unequal verdict by bits, the search for the first update on which the sides differ.
        dismissed: why the verdict counts no more: arbiters contradict it, or its verifier does not answer.
    """

    block: int
    verifier: str
    fee: int
    since_s: float
    equal: bool | None = None
    evidence: str = ""
    account: str = ""
    made: str = ""
    update: int = 0
    against: str = ""
    bisection: Bisection | None = None
    dismissed: Literal["", "contradicted", "silent"] = ""

    @property
    def judges(self) -> bool | None:
        """What it says of the whole block; None: nothing yet, nothing any more, or of a single update alone."""
        return None if self.update or self.dismissed else self.equal


@dataclass(frozen=True, kw_only=True)
class FoundUpdate:
    """The first update of a block on which an agent and a verifier differ, and what came of it.

    Attributes:
        update: its number [updates, from 1]; 0: none was found.
        agent_state, verifier_state: digests of the sides' states after it.
        arbiters: (key, digest of the state that it came to) of each that made it; "": compared by tolerance.
        for_agent, for_verifier: arbiters that were for each.
        is_void: the verifier stated the agent's own state.
    """

    lease_id: str
    block: int
    update: int
    agent: str
    verifier: str
    agent_state: str
    verifier_state: str
    arbiters: tuple[tuple[str, str], ...]
    for_agent: int
    for_verifier: int
    is_void: bool

    def words(self) -> str:
        """As a sentence."""
        if not self.update:
            what = "has stated the agent's own state" if self.is_void else "does not answer"
            return f"block {self.block}: the verifier {self.verifier[:12]}… {what}"
        arbiters = ", ".join(f"{key[:12]}… to {state or 'no bits'}" for key, state in self.arbiters)
        return (
            f"block {self.block}: update {self.update} is the first that differs: the agent came to "
            f"{self.agent_state}, the verifier {self.verifier[:12]}… to {self.verifier_state}"
            + (f", of the arbiters {arbiters}: {self.for_verifier} for the verifier" if arbiters else "")
            + (f", {self.for_agent} for the agent" if arbiters else "")
        )


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """What a lease comes to [micro-credits]: the one decision that both credits and contract carry out.

    Attributes:
        pay: out of the deposit to the agent; the renter has the rest.
        slashed: out of the bond to the renter; the agent has the rest.
        fees: out of the deposit to accounts of verifiers.
    """

    pay: int = 0
    slashed: int = 0
    fees: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lease:
    """All that is known of a lease; times are the control plane's [s since 1970], 0: not yet; money in micro-credits.

    Attributes:
        order, inputs: SHA-256 of what to run, and of further blobs that it names.
        deposit: what the renter put into escrow.
        check_fraction: share of blocks to be replayed; the provider's record may demand more than the renter asked for.
        promised_s: notice that the offer promised [s].
        most_s: longest lease that the offer allows [s].
        beat_index, running_s, samples, chain: of the last beat.
        unsigned: (index, running_s) of beats that are not co-signed yet.
        paid_index, paid_s: last beat that was co-signed, and its seconds.
        reason: why it was closed: `finished`, `lost`, or what who closed it said.
        closed_by: key that closed it.
        outcome: what a dispute came to, if it was decided against the agent; kept when the lease is final.
        ended_by: hash of the event that closed it: what blocks to replay are drawn from.
        contract: terms of its escrow in a contract; None: internal credits.
        voucher: of `paid_s`, for that contract.
        settlement: what it came to, once it is decided.
        forwarded: large blobs that went through the pool, of `forwarded_bytes`, for `forwarded_credits`.
        gang, site: the gang whose site it is; "": none. See `gang`.
        messages: that it has sent to the other sites.
        uncommitted_s: of one that is checked and has ended, seconds after its last commitment that are paid as well.
    """

    lease_id: str
    offer_id: str
    renter: str
    agent: str
    delegate: str
    order: str
    device: str
    determinism_class: str
    rate_per_hour: int
    deposit: int
    bond: int
    window_s: float
    verify_fraction: float
    check_fraction: float
    value_per_hour: int
    forecast: Forecast
    promised_s: float
    most_s: float
    state: LeaseState = "open"
    opened_s: float = 0.0
    accepted_s: float = 0.0
    heard_s: float = 0.0
    closed_s: float = 0.0
    reclaim_by_s: float = 0.0
    beat_index: int = -1
    running_s: int = 0
    samples: int = 0
    chain: str = ""
    unsigned: tuple[tuple[int, int], ...] = ()
    paid_index: int = -1
    paid_s: int = 0
    commitments: tuple[Commitment, ...] = ()
    challenges: tuple[Challenge, ...] = ()
    result: str = ""
    reason: str = ""
    closed_by: str = ""
    outcome: Literal["", "slashed", "refunded"] = ""
    ended_by: str = ""
    inputs: tuple[str, ...] = ()
    num_devices: int = 1
    contract: ContractTerms | None = None
    voucher: str = ""
    settlement: Settlement | None = None
    most_forwarding: int = 0
    forwarded: tuple[str, ...] = ()
    forwarded_bytes: int = 0
    forwarded_credits: int = 0
    gang: str = ""
    site: int = 0
    messages: tuple[SentMessage, ...] = ()
    uncommitted_s: int = 0

    @property
    def renter_account(self) -> str:
        """The account that pays: the renter's key, or its address on the chain."""
        return self.renter if self.contract is None else on_chain(self.contract.payer)

    @property
    def agent_account(self) -> str:
        """The account that is paid, and puts up the bond."""
        return self.agent if self.contract is None else on_chain(self.contract.payee)

    def after(self, kind: str) -> Lease:
        """The lease in the state that an event of this kind leads to.

        Raises:
            Refused: there is no such transition.
        """
        state = TRANSITIONS.get((self.state, kind))
        if state is None:
            possible = sorted(event for (before, event) in TRANSITIONS if before == self.state)
            raise Refused(
                f"lease {self.lease_id} is {self.state}: {kind!r} is not possible in that state",
                remedy=f"Possible now: {', '.join(possible)}." if possible else "It is settled; open another lease.",
            )
        return replace(self, state=state)

    def with_beat(self, *, index: int, running_s: int, samples: int, chain: str, now_s: float, since_s: float) -> Lease:
        """The lease after a beat; its meter may run since `since_s` [s since 1970].

        Raises:
            Refused: the beat is a repetition, goes back, or is ahead of the clock.
        """
        if index != self.beat_index + 1:
            raise Refused(
                f"beat {index} of lease {self.lease_id} is out of order: the next one is {self.beat_index + 1}"
            )
        if running_s < self.running_s or samples < self.samples:
            raise Refused(
                f"beat {index} of lease {self.lease_id} goes back: {running_s} s and {samples} samples after "
                f"{self.running_s} s and {self.samples}"
            )
        passed_s = now_s - since_s
        if running_s > passed_s + CLOCK_SLACK_S:
            raise Refused(
                f"beat {index} of lease {self.lease_id} is ahead of the clock: {running_s} s of running "
                f"{passed_s:.0f} s after it could begin"
            )
        return replace(
            self,
            beat_index=index,
            running_s=running_s,
            samples=samples,
            chain=chain or self.chain,
            heard_s=now_s,
            unsigned=(*self.unsigned[-MOST_UNSIGNED + 1 :], (index, running_s)),
        )

    def cosigned(self, index: int, voucher: str = "") -> Lease:
        """The lease with all beats up to `index` agreed to, and what a contract takes for it.

        Raises:
            Refused: there is no such beat, or it was co-signed before.
        """
        if index <= self.paid_index:
            raise Refused(f"beat {index} of lease {self.lease_id} is co-signed already, up to {self.paid_index}")
        if index > self.beat_index:
            raise Refused(f"lease {self.lease_id} has no beat {index}: its last one is {self.beat_index}")
        seconds = self.seconds_of(index)
        if seconds is None:
            raise Refused(f"beat {index} of lease {self.lease_id} is long ago: co-sign {self.unsigned[0][0]} or later")
        left = tuple(beat for beat in self.unsigned if beat[0] > index)
        return replace(self, paid_index=index, paid_s=seconds, unsigned=left, voucher=voucher)

    def seconds_of(self, index: int) -> int | None:
        """Seconds of a beat that waits to be co-signed; None: it does not."""
        return next((running_s for number, running_s in self.unsigned if number == index), None)

    def with_commitment(self, commitment: Commitment, previous: str) -> Lease:
        """The lease with one more commitment.

        Raises:
            Refused: it is not the next one, goes back, or does not name the state before it.
        """
        last = self.commitments[-1] if self.commitments else None
        if len(self.commitments) >= MOST_COMMITMENTS:
            raise Refused(
                f"lease {self.lease_id} has {MOST_COMMITMENTS} blocks, and no more are taken",
                remedy="Longer blocks: --place-option block=5min.",
            )
        if commitment.block != len(self.commitments):
            raise Refused(
                f"commitment {commitment.block} of lease {self.lease_id} is out of order: the next one is "
                f"{len(self.commitments)}"
            )
        if previous != ("" if last is None else last.state):
            raise Refused(
                f"commitment {commitment.block} of lease {self.lease_id} does not follow the one before: it names "
                f"{previous[:12] or 'none'}…, the log has {'none' if last is None else last.state[:12]}…"
            )
        before = 0 if last is None else last.update  # of a lease that goes on from a block replays know it
        if commitment.update <= before:
            raise Refused(
                f"commitment {commitment.block} of lease {self.lease_id} is at update {commitment.update}, and what "
                f"came before it at {before}: a block has an update at least"
            )
        return replace(self, commitments=(*self.commitments, commitment))

    def require_silence(self, least_s: float, now_s: float) -> None:
        """Raises Refused if the agent was heard less than `least_s` ago."""
        silent_s = now_s - self.heard_s
        if silent_s < least_s:
            raise Refused(
                f"the agent of lease {self.lease_id} was heard {format_seconds(silent_s)} ago; only silence of "
                f"{format_seconds(least_s)} ends a lease"
            )

    @property
    def committed_s(self) -> int:
        """Seconds on the meter at its last commitment; 0: it has none."""
        return self.commitments[-1].running_s if self.commitments else 0

    @property
    def payable_s(self) -> int:
        """Co-signed seconds that are paid."""
        return min(self.paid_s, self.most_payable_s)

    @property
    def most_payable_s(self) -> int:
        """Seconds that are paid if all are co-signed.

        Of a lease that is checked it is those up to the last commitment, which replays can check, and `uncommitted_s`.
        """
        if not self.check_fraction:
            return self.running_s
        return min(self.running_s, self.committed_s + self.uncommitted_s)

    @property
    def tail_s(self) -> int:
        """What an agent is paid for after its last commitment, where its lease ends without its doing [s].

        The shortest block so far, and none before the first: more than was done at least once is not believed.
        """
        at = [0, *(one.running_s for one in self.commitments)]
        return min((after - before for before, after in pairwise(at)), default=0)

    @property
    def is_stalled(self) -> bool:
        """Whether a lease that is checked has gone on for too long without a block."""
        block_s = self.committed_s // max(1, len(self.commitments))
        longest_s = max(STALLED_S, 2 * MOST_UNPAID * block_s)
        return bool(self.check_fraction) and self.running_s - self.committed_s >= longest_s

    @property
    def settles_s(self) -> float:
        """When the time to dispute is over [s since 1970]: at the end, of a lease in which nothing was done."""
        is_idle = not self.accepted_s or (bool(self.gang) and not (self.running_s or self.commitments or self.messages))
        return self.closed_s + (0.0 if is_idle else self.window_s)

    @property
    def verdict_s(self) -> float:
        """How long a verifier has for one block [s]: ten times what a block took on average, `VERDICT_S` at least."""
        return max(VERDICT_S, 10 * self.running_s / max(1, len(self.commitments)))

    def is_in_time(self, challenge: Challenge, now_s: float) -> bool:
        """Whether a challenge has no verdict yet, and time for one."""
        return challenge.equal is None and now_s - challenge.since_s < self.verdict_s

    def asked_for(self, block: int, now_s: float, *, whole: bool) -> set[str]:
        """Agents that are asked for a block no more, since each has one word on it.

        An arbiter that gave none in its time can still be asked for the whole block.
        """
        of_block = [one for one in self.challenges if one.block == block]
        silent = [one for one in of_block if one.update and one.equal is None and not self.is_in_time(one, now_s)]
        return {one.verifier for one in of_block if not (whole and one in silent)}

    @property
    def open_challenges(self) -> tuple[Challenge, ...]:
        """Challenges without a verdict."""
        return tuple(challenge for challenge in self.challenges if challenge.equal is None)

    def unequal(self, block: int) -> set[str]:
        """Verifiers that found a block unequal."""
        return {one.verifier for one in self.challenges if one.block == block and one.judges is False}

    def num_agreeing(self, block: int) -> int:
        """How many agents that found a block, or one update of it, unequal do not contradict each other.

        Of those that compared bits it is those that came to one state: a job that computes something else on each
        machine says nothing about its agent. Arbiters of an update agree with the verifier whose states they confirm.
        """
        whole = [one for one in self.challenges if one.block == block and one.judges is False]
        made = Counter(one.made for one in whole)
        confirmed = [1 + len(self.arbiters(one, against_agent=True)) for one in whole if one.bisection is not None]
        return max(made.pop("", 0) + max(made.values(), default=0), *confirmed, 0)

    def arbiters(self, verdict: Challenge, *, against_agent: bool) -> set[str]:
        """Arbiters of a verdict that were for the verifier, or for the agent; some are for neither."""
        search = verdict.bisection
        if search is None:
            return set()
        answers = [
            one
            for one in self.challenges
            if one.block == verdict.block and one.update and one.against == verdict.verifier and one.equal is not None
        ]
        if not against_agent:
            return {one.verifier for one in answers if one.equal}
        return {one.verifier for one in answers if not one.equal and one.made in ("", search.verifier.end)}

    def searched(self, block: int, verifier: str) -> tuple[Challenge, Bisection]:
        """The unequal verdict of a verifier on a block, and the search that it began.

        Raises:
            Refused: there is none.
        """
        for one in self.challenges:
            if (one.block, one.verifier) == (block, verifier) and one.bisection is not None:
                return one, one.bisection
        raise Refused(f"{verifier[:12]}… has given no unequal verdict on block {block} of lease {self.lease_id}")

    def found_update(self, verdict: Challenge, search: Bisection) -> FoundUpdate:
        """What the search that a verdict began has found."""
        arbiters = [
            (one.verifier, one.made)
            for one in self.challenges
            if one.update and one.equal is not None and (one.block, one.against) == (verdict.block, verdict.verifier)
        ]
        return FoundUpdate(
            lease_id=self.lease_id,
            block=verdict.block,
            update=search.update,
            agent=self.agent,
            verifier=verdict.verifier,
            agent_state=search.agent.end,
            verifier_state=search.verifier.end,
            arbiters=tuple(arbiters),
            for_agent=len(self.arbiters(verdict, against_agent=False)),
            for_verifier=len(self.arbiters(verdict, against_agent=True)),
            is_void=search.is_void,
        )

    @property
    def found_updates(self) -> list[FoundUpdate]:
        """Updates on which the agent and verifiers were found to differ first."""
        searches = [(one, one.bisection) for one in self.challenges if one.bisection is not None]
        return [self.found_update(one, search) for one, search in searches if search.update]

    def party(self, key: str, verdict: Challenge) -> Party | None:
        """Which side a key is in the search that a verdict began."""
        return "agent" if key == self.agent else "verifier" if key == verdict.verifier else None

    def with_challenge(self, before: Challenge, after: Challenge) -> Lease:
        """The lease with one challenge in the place of another."""
        return replace(self, challenges=tuple(after if one is before else one for one in self.challenges))

    def equal(self, block: int) -> set[str]:
        """Verifiers that found a block equal."""
        return {one.verifier for one in self.challenges if one.block == block and one.judges is True}

    @property
    def unequal_blocks(self) -> list[int]:
        """Blocks that a verifier found unequal."""
        return sorted({one.block for one in self.challenges if one.judges is False})

    @property
    def evidence(self) -> dict[str, set[str]]:
        """SHA-256 of the records of replays, and of states that were supplied; with the keys that named each."""
        found: dict[str, set[str]] = {}
        for challenge in self.challenges:
            if challenge.evidence:
                found.setdefault(challenge.evidence, set()).add(challenge.verifier)
            if challenge.bisection is not None:
                for key, side in (
                    (self.agent, challenge.bisection.agent),
                    (challenge.verifier, challenge.bisection.verifier),
                ):
                    for blob in side.blobs:
                        found.setdefault(blob, set()).add(key)
        return found

    @property
    def supplied(self) -> frozenset[str]:
        """SHA-256 of the states that were supplied for arbiters."""
        searches = [one.bisection for one in self.challenges if one.bisection is not None]
        return frozenset[str]().union(*(side.blobs for one in searches for side in (one.agent, one.verifier)))

    def has_sent(self, digest: str) -> bool:
        """Whether a blob is one of its messages."""
        return any(message.blob == digest for message in self.messages)

    @property
    def blobs(self) -> frozenset[str]:
        """SHA-256 of all blobs that the lease needs."""
        messages = (one.blob for one in self.messages)
        return frozenset(
            {self.order, *self.inputs, *(one.blob for one in self.commitments), *messages, self.result} - {""}
        )
