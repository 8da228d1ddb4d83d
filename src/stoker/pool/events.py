"""Signed events: the only way in which a pool changes.

The actor signs a `Draft` (kind, body, time, nonce, its key, and the pool's key, so that it counts in one pool). The
control plane adds the position in the log: `Event`, with the hash of the one before. What is signed and hashed is
canonical JSON: keys sorted, no spaces, ASCII. Money is in whole micro-credits; 1 credit is 1 USD of internal credit.

Rates are per hour (`rate_per_hour`), since a cheap device's micro-credits per second would round by a tenth or more;
they are paid by the second.

| kind | who signs | what it does |
|---|---|---|
| founded | control plane | first event: names the pool and its rules |
| deposited | control plane | admits a key, and gives it credits |
| offered, withdrawn | agent | puts a device up, or takes it back |
| opened | renter | takes an offer: deposit into escrow |
| stopped | renter | no further lease of a run is opened, or again |
| gang | renter | takes several offers for the sites of one run, all or none; see `gang` |
| accepted | agent | bond into escrow; the meter may run |
| beat | agent | seconds run so far |
| cosigned | renter or its delegate | agrees to a beat: seconds up to it are paid |
| committed | agent | hash of the run's state after a block of updates, and its checkpoint's |
| sent | agent | its site's message to the others of its gang |
| suspected, lost | control plane | beats are missing |
| reclaiming | agent | the owner needs the device: notice |
| finished | agent | the job's results are there |
| closed | renter, agent or control plane | the meter stops |
| challenged | control plane | a block is to be replayed by an agent that is named |
| verdict | verifier | what its replay showed |
| traced | agent or verifier | digests of its states inside a block on which they differ; see `bisection` |
| supplied | agent or verifier | its states around the first update on which they differ |
| dismissed | control plane | a verdict does not count: arbiters contradict it, or its verifier does not answer |
| disputed | renter or control plane | pay is held until it is settled |
| slashed, refunded | control plane | pay goes back to the renter, with or without the agent's bond |
| forwarded | control plane | the renter pays for a large blob that went through the pool; see `forwarding` |
| final | renter or control plane | pay to the agent, what is left to the renter |
| anchored | control plane | Merkle root of the events since the last one |
| team | control plane | a team of renters: weight, priority, quota |
| waiting | renter | found no free offer: keeps its place |
| preempting | control plane | a lease makes room for a higher priority, after its notice |
| probed | control plane | how fast offers answered alone and at one moment; see `joint_probe` |
| linked | agent | what it measured of its direct path to another agent; see `pair_links` |

Source: RFC 8785 (canonical JSON) for the idea; numbers are written as Python does.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import time
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from stoker.errors import BadSetting, StokerError
from stoker.pool.keys import Key, is_digest, is_signed
from stoker.records.codec import JSON, from_json, parsed, to_json

CREDIT = 1_000_000
"""Micro-credits of one credit."""
CLOCK_WINDOW_S = 120.0
"""Most that the clock of who acts may differ from the control plane's [s]."""
MOST_BYTES = 64 * 1024
"""Size of an event at most [bytes]."""
MOST_WINDOW_S = 7 * 24 * 3600
"""Longest time to dispute [s]: so long a bond can be held."""
MOST_SITES = 16
"""Leases of one gang."""
MOST_DEVICES = 1024
"""Devices of one offer."""
_MOST_MONEY = 10**15
"""A thousand million credits: what any amount is below, so that sums stay exact in every reader [micro-credits]."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
_ADDRESS = re.compile(r"0x[0-9a-f]{40}")
_CONTRACT = re.compile(r"eip155:[1-9][0-9]{0,17}:0x[0-9a-f]{40}")
_VOUCHER = re.compile(r"([0-9a-f]{130})?")
_MOST_TEXT = 1000

Isolation = Literal["podman", "gvisor", "bubblewrap"]


class Refused(StokerError):
    """The pool does not take an event: it is illegal, unsigned, stale, or not covered by money."""

    exit_code = 2
    http_status = 409


class NotNow(Refused):
    """An offer cannot be taken now, and may be later: it is taken, or it is the turn of others."""

    http_status = 423


def canonical(value: JSON) -> bytes:
    """Canonical JSON: equal content, equal bytes.

    Raises:
        ValueError: a number that JSON cannot hold.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def sha256(data: bytes) -> str:
    """SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


# --------------------------------------------------------------------------------------------------------------- bodies


KINDS: dict[str, type[Body]] = {}
"""Every kind of event and its body, in the order in which they stand below."""


class Body:
    """What an event of one kind says, or a part of it. Fields named below are checked in the same way for all bodies.

    Raises:
        BadSetting: a value that cannot be meant.
    """

    event_kind: ClassVar[str] = ""
    _ids: ClassVar[frozenset[str]] = frozenset({"lease_id", "offer_id", "request_id", "run", "team"})
    _hashes: ClassVar[frozenset[str]] = frozenset(
        (
            *("account", "verifier", "against", "other", "operator"),  # keys
            *("order", "blob", "before", "after", "result", "evidence", "seal"),
            *("state", "previous", "made", "root"),
        )
    )
    _addresses: ClassVar[frozenset[str]] = frozenset({"payer", "payee", "cosigner"})
    _may_be_empty: ClassVar[frozenset[str]] = frozenset(
        {"evidence", "made", "result", "delegate", "previous", "against", "before", "after", "seal"}
    )
    _money: ClassVar[frozenset[str]] = frozenset(
        (
            *("amount", "deposit", "bond", "credits", "fee", "forward_price", "most_forwarding"),
            *("rate_per_hour", "price_per_hour", "value_per_hour", "cost_per_hour"),
        )
    )

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.event_kind = kind
        if kind:
            KINDS[kind] = cls

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # every body is a dataclass
            self._check(each.name, getattr(self, each.name))

    def _check(self, name: str, value: Any) -> None:
        if isinstance(value, str) and len(value) > _MOST_TEXT:
            raise BadSetting(f"{name} has {len(value)} characters, at most {_MOST_TEXT} are taken")
        if name in self._ids and not _ID.fullmatch(value):
            raise BadSetting(f"{name} {value[:80]!r}: wanted 1 to 64 letters, digits, '.', '_' or '-'")
        if name in self._hashes and not (is_digest(value) or (not value and name in self._may_be_empty)):
            raise BadSetting(f"{name} {value[:80]!r}: wanted 64 hexadecimal digits in lower case")
        if name in self._addresses and value and not _ADDRESS.fullmatch(value):
            raise BadSetting(f"{name} {value[:80]!r}: wanted an address, 0x and 40 hexadecimal digits in lower case")
        if name in self._money and not 0 <= value <= _MOST_MONEY:
            raise BadSetting(f"{name} {value}: wanted 0 to {_MOST_MONEY} micro-credits")
        is_plain = name not in self._money and isinstance(value, int | float)
        if is_plain and not 0 <= value <= 2**53:  # neither is NaN
            raise BadSetting(f"{name} {value}: wanted 0 or more")


@dataclass(frozen=True, kw_only=True)
class Founded(Body, kind="founded"):
    """Rules of the pool, fixed for its life.

    Attributes:
        name: for people.
        is_open: anyone may act; else only keys that the operator has admitted by a deposit, of 0 at least.
        verdicts_to_slash: different verifiers that must find the same block unequal before a bond is cut.
        least_window_s: shortest time in which a result can be disputed [s].
        contract: that holds the money, as `eip155:CHAIN:ADDRESS` (CAIP-10); "": internal credits.
        forward_price: of a GiB in large blobs that goes through the pool [micro-credits].
        forward_quota_bytes: of large blobs that go through the pool for one lease at most; 0: any number.
    """

    name: str
    is_open: bool = False
    verdicts_to_slash: int = 2
    least_window_s: int = 0
    contract: str = ""
    forward_price: int = 0
    forward_quota_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.contract and not _CONTRACT.fullmatch(self.contract):
            raise BadSetting(f"contract {self.contract[:80]!r}: wanted eip155:CHAIN:ADDRESS in lower case")
        if self.contract and self.forward_price:
            raise BadSetting(f"forward_price {self.forward_price}: a contract pays for time alone; wanted 0 with one")
        if not 1 <= self.verdicts_to_slash <= 9:
            raise BadSetting(f"verdicts_to_slash {self.verdicts_to_slash}: wanted 1 to 9")


@dataclass(frozen=True, kw_only=True)
class Deposited(Body, kind="deposited"):
    """Internal credits for a key."""

    account: str
    amount: int


@dataclass(frozen=True, kw_only=True)
class OfferedDevice(Body):
    """What is lent: `count` devices of a catalogue kind such as `rtx-4090` or `cpu`, with their memory [bytes] each."""

    kind: str
    count: int = 1
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _DEVICE.fullmatch(self.kind):
            raise BadSetting(f"device.kind {self.kind[:80]!r}: wanted 1 to 64 letters, digits, '.', '_', ':' or '-'")


@dataclass(frozen=True, kw_only=True)
class Measured(Body):
    """What the agent's probe reached on one device: 0 where it was not measured."""

    fp32_flop_per_s: float = 0.0
    bf16_flop_per_s: float = 0.0
    bytes_per_s: float = 0.0
    cores: int = 0


@dataclass(frozen=True, kw_only=True)
class Offer(Body):
    """A device for rent.

    Attributes:
        determinism_class: digest of what makes runs bit-equal: device model, libraries, flags.
        price_per_hour: for the whole offer [micro-credits].
        cost_per_hour: what an hour costs the owner [micro-credits]; a lower price is refused.
        reclaim_s: notice that the owner promises before taking the device back [s].
        hours: from and to [hours of the day, UTC]; None: always.
        min_s, max_s: shortest and longest lease [s].
        upload_bytes_per_s, download_bytes_per_s: of the agent's link, as it measured it.
        expires_s: when the offer lapses unless it is made again [s since 1970].
        payee: address that puts up bonds and is paid, in a pool whose money is in a contract.
    """

    offer_id: str
    device: OfferedDevice
    measured: Measured = Measured()
    determinism_class: str = ""
    isolation: Isolation
    price_per_hour: int
    cost_per_hour: int = 0
    reclaim_s: int = 120
    hours: tuple[int, int] | None = None
    min_s: int = 60
    max_s: int = 7 * 24 * 3600
    upload_bytes_per_s: float = 0.0
    download_bytes_per_s: float = 0.0
    disk_bytes: int = 0
    expires_s: float
    payee: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_s > self.max_s:
            raise BadSetting(f"min_s {self.min_s} is more than max_s {self.max_s}")
        if self.hours is not None and not all(0 <= hour < 24 for hour in self.hours):
            raise BadSetting(f"hours {self.hours}: wanted two hours of the day, 0 to 23")
        if not 1 <= self.device.count <= MOST_DEVICES:
            raise BadSetting(f"device.count {self.device.count}: wanted 1 to {MOST_DEVICES}")


@dataclass(frozen=True, kw_only=True)
class Offered(Body, kind="offered"):
    """A new offer, or an earlier one of that name again with a later `expires_s`."""

    offer: Offer


@dataclass(frozen=True, kw_only=True)
class Withdrawn(Body, kind="withdrawn"):
    """An offer is taken back; a lease on it goes on."""

    offer_id: str


@dataclass(frozen=True, kw_only=True)
class Forecast(Body):
    """What the renter expects.

    Attributes:
        hours: of the meter [h].
        credits: for them [micro-credits], replays not included.
        raw_hours: of them before earlier runs corrected them [h]; 0: not known. What the next correction is made of.
        job: what the renter calls the job, such as its JobSpec's digest: later forecasts of the same job learn from it.
    """

    hours: float
    credits: int
    raw_hours: float = 0.0
    job: str = ""


@dataclass(frozen=True, kw_only=True)
class ContractTerms(Body):
    """What a lease's escrow in a contract has beyond the lease itself.

    Attributes:
        payer: the renter's address.
        payee: the agent's, as its offer has it.
        cosigner: whose vouchers count: the renter's, or that of the pool.
        deadline_s: until when only the pool's verdict settles [s since 1970].
    """

    payer: str
    payee: str
    cosigner: str
    deadline_s: int


@dataclass(frozen=True, kw_only=True)
class Opened(Body, kind="opened"):
    """An offer is taken.

    Attributes:
        order: SHA-256 of the blob that says what to run.
        rate_per_hour: what an hour of the meter costs [micro-credits].
        deposit: from the renter into escrow [micro-credits]; see `escrow.required_deposit`.
        bond: what the agent puts up [micro-credits].
        window_s: time to dispute after the end [s].
        verify_fraction: share of blocks that another agent replays [0 to 1].
        value_per_hour: what an hour of waiting is worth to the renter [micro-credits].
        delegate: another key that may co-sign beats, such as the control plane's; "": the renter's alone.
        inputs: SHA-256 of further blobs that the order names: code and data, a block of an earlier lease.
        contract: terms of the escrow, in a pool whose money is in a contract.
        most_forwarding: spent at most on large blobs that go through the pool, besides the deposit [micro-credits].
        gang: name of the gang whose site this is; "": the run has one lease at a time.
        site, sites: which site, from 0, of how many.
    """

    lease_id: str
    offer_id: str
    order: str
    rate_per_hour: int
    deposit: int
    bond: int = 0
    window_s: int = 3600
    verify_fraction: float = 0.0
    value_per_hour: int = 0
    forecast: Forecast
    delegate: str = ""
    inputs: tuple[str, ...] = ()
    contract: ContractTerms | None = None
    most_forwarding: int = 0
    gang: str = ""
    site: int = 0
    sites: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gang and not (_ID.fullmatch(self.gang) and self.site < self.sites <= MOST_SITES):
            raise BadSetting(
                f"gang {self.gang[:80]!r}, site {self.site} of {self.sites}: wanted a name of 1 to 64 letters, digits, "
                f"'.', '_' or '-', and {MOST_SITES} sites at most"
            )
        if self.window_s > MOST_WINDOW_S:
            raise BadSetting(f"window_s {self.window_s}: wanted {MOST_WINDOW_S} s at most")
        if len(self.inputs) > 16 or not all(is_digest(one) for one in self.inputs):
            raise BadSetting("inputs: wanted 16 at most, each of 64 hexadecimal digits in lower case")
        if not 0 <= self.verify_fraction <= 1:
            raise BadSetting(f"verify_fraction {self.verify_fraction}: wanted 0 to 1")
        if self.delegate and not is_digest(self.delegate):
            raise BadSetting(f"delegate {self.delegate!r}: wanted a key, 64 hexadecimal digits in lower case")


@dataclass(frozen=True, kw_only=True)
class GangOpened(Body, kind="gang"):
    """Offers are taken for all sites of a run, by site: all of these leases are opened, or none."""

    leases: tuple[Opened, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= len(self.leases) <= MOST_SITES or not all(one.gang for one in self.leases):
            raise BadSetting(f"leases: wanted 2 to {MOST_SITES}, each of one gang")


@dataclass(frozen=True, kw_only=True)
class RunStopped(Body, kind="stopped"):
    """No lease of a run, or of a gang, is opened any more, whichever machine of the renter asks; or again.

    `run`: what the names of its leases begin with, `RUN.0`, `RUN.1`, …; or the name of the gang.
    """

    run: str
    is_stopped: bool = True


@dataclass(frozen=True, kw_only=True)
class Sent(Body, kind="sent"):
    """A site's message of the exchange after update `update` (from 0) about a fragment; `blob`: SHA-256 of its file."""

    lease_id: str
    update: int
    fragment: int
    blob: str


@dataclass(frozen=True, kw_only=True)
class Accepted(Body, kind="accepted"):
    """The agent takes the lease."""

    lease_id: str


@dataclass(frozen=True, kw_only=True)
class Beat(Body, kind="beat"):
    """The job ran `running_s` whole seconds so far and trained on `samples`; `state`: its last commitment, or ""."""

    lease_id: str
    index: int
    running_s: int
    samples: int = 0
    state: str = ""

    _may_be_empty: ClassVar[frozenset[str]] = frozenset({"state"})


@dataclass(frozen=True, kw_only=True)
class Cosigned(Body, kind="cosigned"):
    """The renter agrees to all beats up to `index`.

    `voucher`: where a contract holds the money, the co-signer's signature of the seconds up to that beat (EIP-712), 130
    hexadecimal digits.
    """

    lease_id: str
    index: int
    voucher: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _VOUCHER.fullmatch(self.voucher):
            raise BadSetting("voucher: wanted a signature, 130 hexadecimal digits in lower case")


@dataclass(frozen=True, kw_only=True)
class Committed(Body, kind="committed"):
    """State of the run after block `block` (from 0), `update` updates in.

    Attributes:
        state: hash of weights, optimiser, generators and position.
        blob: SHA-256 of the checkpoint.
        previous: `state` of the block before; "" for the first.
        seal: key of the file with the checkpoint (`sealing`); "": it is not encrypted.
    """

    lease_id: str
    block: int
    update: int
    state: str
    blob: str
    previous: str = ""
    seal: str = ""


@dataclass(frozen=True, kw_only=True)
class Suspected(Body, kind="suspected"):
    """Two beats are missing."""

    lease_id: str


@dataclass(frozen=True, kw_only=True)
class Lost(Body, kind="lost"):
    """Four beats are missing: the lease ends with its last co-signed beat."""

    lease_id: str


@dataclass(frozen=True, kw_only=True)
class Reclaiming(Body, kind="reclaiming"):
    """The owner takes the device back at `by_s` [s since 1970]."""

    lease_id: str
    by_s: float


@dataclass(frozen=True, kw_only=True)
class Finished(Body, kind="finished"):
    """The job is done; `result`: SHA-256 of its results."""

    lease_id: str
    result: str


@dataclass(frozen=True, kw_only=True)
class Closed(Body, kind="closed"):
    """The lease ends before the job is done, or was never accepted."""

    lease_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Challenged(Body, kind="challenged"):
    """Block `block` is to be replayed by `verifier` for `fee` [micro-credits, out of the escrow].

    Attributes:
        draw: the pool's signature from which the blocks are drawn; see `state.drawn_blocks`.
        update: of an arbiter: the one update that is to be made again, on which the agent and the verifier `against`
            differ first [updates, from 1]; 0: the whole block.
    """

    lease_id: str
    block: int
    verifier: str
    draw: str
    fee: int = 0
    update: int = 0
    against: str = ""


@dataclass(frozen=True, kw_only=True)
class VerdictGiven(Body, kind="verdict"):
    """What a replay showed: whether the state after the block, or the update, is equal to the agent's.

    Attributes:
        verifier: who replayed: the key that signs.
        evidence: SHA-256 of the record of the replay.
        made: digest of the state that an unequal replay, or an arbiter, came to, where bits were compared; verifiers
            that came to different ones contradict each other.
        begins: of an unequal replay of a lease's first block: updates before it, as the order has them [updates].
        against: of an arbiter, the verifier whose verdict it settles.
    """

    lease_id: str
    block: int
    verifier: str
    equal: bool
    evidence: str = ""
    made: str = ""
    begins: int = 0
    against: str = ""


@dataclass(frozen=True, kw_only=True)
class Traced(Body, kind="traced"):
    """Digests of a side's states after the updates that are asked for: see `bisection.points`; none gives up.

    Attributes:
        verifier: whose verdict it is about: the actor is that verifier, or the agent of the lease.
        previous: of the agent, for the first block: head of the chain before it, as the order has it.
    """

    lease_id: str
    block: int
    verifier: str
    states: tuple[str, ...] = ()
    previous: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(is_digest(state) for state in self.states):
            raise BadSetting("states: wanted digests, each of 64 hexadecimal digits in lower case")


@dataclass(frozen=True, kw_only=True)
class Supplied(Body, kind="supplied"):
    """Blobs with a side's checkpoints before and after the update on which they differ; without `after` it gives up.

    `before` is empty where the update is the block's first: that state is committed.
    """

    lease_id: str
    block: int
    verifier: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class Dismissed(Body, kind="dismissed"):
    """The verdict of `verifier` on a block counts no more."""

    lease_id: str
    block: int
    verifier: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Disputed(Body, kind="disputed"):
    """Pay is held until the dispute is settled."""

    lease_id: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Slashed(Body, kind="slashed"):
    """All pay of the lease, and `amount` of the bond [micro-credits], go to the renter."""

    lease_id: str
    amount: int
    reason: str
    evidence: str = ""


@dataclass(frozen=True, kw_only=True)
class Refunded(Body, kind="refunded"):
    """All pay of the lease goes back to the renter; the agent keeps its bond."""

    lease_id: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Forwarded(Body, kind="forwarded"):
    """A blob of the lease, of `num_bytes`, went through the pool: `amount` from the renter to the pool's operator."""

    lease_id: str
    blob: str
    num_bytes: int
    amount: int


@dataclass(frozen=True, kw_only=True)
class Final(Body, kind="final"):
    """The lease is settled."""

    lease_id: str


@dataclass(frozen=True, kw_only=True)
class Anchored(Body, kind="anchored"):
    """Merkle root of the hashes of events `first` to `last`."""

    root: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class TeamMade(Body, kind="team"):
    """A team of renters, or an earlier one of that name again; see `fair_use`.

    Attributes:
        members: their keys; a key belongs to the team that named it first.
        weight: a team of weight 2 is due twice the share.
        priority: higher ones come first, and may have leases of lower ones preempted.
        most_devices: quota of devices at a time; 0: none.
    """

    team: str
    members: tuple[str, ...] = ()
    weight: float = 1.0
    priority: int = 0
    most_devices: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(is_digest(member) for member in self.members):
            raise BadSetting("members: wanted keys, each of 64 hexadecimal digits in lower case")
        if not self.weight > 0:
            raise BadSetting(f"weight {self.weight}: wanted more than 0")


@dataclass(frozen=True, kw_only=True)
class Waiting(Body, kind="waiting"):
    """The renter waits for a device of one of these kinds (none named: any) until `until_s` [s since 1970]."""

    request_id: str
    kinds: tuple[str, ...] = ()
    until_s: float


@dataclass(frozen=True, kw_only=True)
class Preempting(Body, kind="preempting"):
    """The lease ends at `by_s` [s since 1970], for someone with a higher priority."""

    lease_id: str
    by_s: float


@dataclass(frozen=True, kw_only=True)
class ProbeTimes(Body):
    """How long an offer's devices took for one seeded product that fills their memory, in each round [s].

    Attributes:
        agent: who made the offer.
        claimed_s: what they take by the rate that the offer states; 0: it states none.
        alone_s: while no other one that was probed was asked; 0: no right answer in time. May be empty.
        together_s: while all that were probed were asked at one moment; likewise.
    """

    offer_id: str
    agent: str
    claimed_s: float = 0.0
    alone_s: tuple[float, ...] = ()
    together_s: tuple[float, ...] = ()

    _hashes: ClassVar[frozenset[str]] = frozenset({"agent"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for times in (self.alone_s, self.together_s):
            if len(times) > 16 or not all(0 <= time_s <= 2**53 for time_s in times):
                raise BadSetting("times of a probe: wanted 16 at most, each 0 or more")


@dataclass(frozen=True, kw_only=True)
class Probed(Body, kind="probed"):
    """Offers were asked for exact products; what follows is in `joint_probe`."""

    offers: tuple[ProbeTimes, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= len(self.offers) <= 16 or len({one.offer_id for one in self.offers}) < len(self.offers):
            raise BadSetting("offers: wanted 2 to 16, each once")


@dataclass(frozen=True, kw_only=True)
class Linked(Body, kind="linked"):
    """What an agent measured of its direct path to the agent `other`: rates of 0 say that there is none."""

    other: str
    upload_bytes_per_s: float = 0.0
    download_bytes_per_s: float = 0.0
    delay_s: float = 0.0


def kind_of(body: Body) -> str:
    """The kind of event that has such a body."""
    return body.event_kind


# --------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, kw_only=True)
class Draft:
    """An event as its actor signed it, before the log took it.

    Attributes:
        pool: public key of the control plane: a draft counts in that pool alone.
        time_s: the actor's clock [s since 1970].
        nonce: 32 hexadecimal digits; the log takes one (actor, nonce) once.
    """

    pool: str
    actor: str
    kind: str
    body: JSON
    time_s: float
    nonce: str
    signature: str = ""

    def message(self) -> bytes:
        """What is signed."""
        signed = {name: getattr(self, name) for name in ("pool", "actor", "kind", "body", "time_s", "nonce")}
        return b"stoker pool event 1\n" + canonical(signed)

    def is_signed(self) -> bool:
        """Whether its actor signed it."""
        return is_signed(self.actor, self.message(), self.signature)

    def read_body(self) -> Body:
        """The body as a record.

        Raises:
            Refused: unknown kind, or a body that does not fit it; the field is named.
        """
        if self.kind not in KINDS:
            raise Refused(f"{self.kind[:80]!r} is no kind of event", remedy=f"Known: {', '.join(KINDS)}.")
        try:
            return from_json(self.body, KINDS[self.kind])
        except ValueError as problem:
            raise Refused(f"{self.kind}: {problem}") from problem


def draft_of(body: Body, key: Key, pool: str, *, time_s: float | None = None, nonce: str | None = None) -> Draft:
    """`body` signed with `key`, for the pool whose public key is `pool`."""
    unsigned = {
        "pool": pool,
        "actor": key.public,
        "kind": kind_of(body),
        "body": to_json(body),
        "time_s": round(time.time() if time_s is None else time_s, 3),
        "nonce": nonce or secrets.token_hex(16),
    }
    return Draft(**unsigned, signature=key.sign(Draft(**unsigned).message()))


_NONCE = re.compile(r"[0-9a-f]{32}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")


def read_draft(content: bytes) -> Draft:
    """A draft that another machine sent.

    Raises:
        Refused: it is too long, no JSON, or has other fields.
    """
    if len(content) > MOST_BYTES:
        raise Refused(
            f"an event has at most {MOST_BYTES} bytes, this one has more", remedy="Send a blob, name its hash."
        )
    try:
        draft = from_json(parsed(content), Draft)
        if not (is_digest(draft.actor) and _NONCE.fullmatch(draft.nonce) and _SIGNATURE.fullmatch(draft.signature)):
            raise ValueError("actor, nonce and signature are 64, 32 and 128 hexadecimal digits in lower case")
        if not math.isfinite(draft.time_s):
            raise ValueError("time_s is no time")
        if to_json(draft.body) != draft.body:  # it would be stored as another body than the one that was signed
            raise ValueError("its body has text that is no Unicode")
        canonical(draft.body)
    except (ValueError, RecursionError) as problem:
        raise Refused(f"this is no signed event: {problem}") from problem
    return draft


@dataclass(frozen=True, kw_only=True)
class Event:
    """A draft with its place in the log.

    Attributes:
        seq: number, from 1.
        previous: hash of the event before; 64 zeros for the first.
        received_s: the control plane's clock [s since 1970]; never goes back. All rules about time use it.
    """

    seq: int
    previous: str
    received_s: float
    draft: Draft

    @property
    def kind(self) -> str:
        """The draft's."""
        return self.draft.kind

    @property
    def actor(self) -> str:
        """The draft's."""
        return self.draft.actor

    def document(self) -> dict[str, JSON]:
        """As stored and sent: one flat object."""
        return {"seq": self.seq, "previous": self.previous, "received_s": self.received_s, **to_json(self.draft)}

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of the canonical document."""
        return sha256(canonical(self.document()))


FIRST_PREVIOUS = "0" * 64


def read_event(document: JSON) -> Event:
    """An event from its document.

    Raises:
        ValueError: it has other fields or other types; the field is named.
    """
    if not isinstance(document, dict):
        raise ValueError("an event is an object")  # noqa: TRY004 - like every other misfit
    own = {name: document.get(name) for name in ("seq", "previous", "received_s")}
    rest = {name: value for name, value in document.items() if name not in own}
    return from_json({**own, "draft": rest}, Event)
