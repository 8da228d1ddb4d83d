"""What a renter asks of a pool besides the run itself, and the free offers that meet it.

Options of a place (`--place-option`) are read here: `pool=ADDRESS` (or `$STOKER_POOL`), `verify=5%`, `bond=1usd`,
`block=60s`, `window=1h`, `value=1usd` (an hour of waiting), `key=NAME`, `isolation=gvisor` (no weaker one),
`forwarding=1usd` (spent at most on large files that go through the pool, each lease), `p2p=no` (all of them do),
`move=no` (a run that goes well stays where it is), `probed=yes` (only offers that met their time together with others),
`wait=2h` (in the pool's queue, where no offer can be taken now), `agents=2` (a site of `Job(sync=…)` at each).
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from stoker.errors import BadJob
from stoker.launching.launcher import Handle, LaunchTarget
from stoker.pool.client import PoolClient
from stoker.pool.events import MOST_SITES, Isolation
from stoker.pool.matching import (
    ISOLATIONS,
    Columns,
    Match,
    Needs,
    RunForecast,
    forecast_word,
    listed_offers,
    rank_offers,
)
from stoker.pool.state import ListedOffer
from stoker.units import parse_duration, parse_money

Default = TypeVar("Default", int, None)

FORECASTS, IDENTITY, EXCHANGES = "forecasts", "identity", "exchanges"
"""Options that `renting.with_forecasts` adds."""


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """What the sites of a job exchange.

    Attributes:
        num_bytes: of one site's message, all fragments together [bytes].
        count: exchanges of the whole run.
        fragments: that are exchanged one after the other within an interval.
        overlap: updates that are made while one is exchanged [updates].
        parameters: that are trained.
        interval: updates between two.
        num_updates: of the whole run.
    """

    num_bytes: float = 0.0
    count: int = 0
    fragments: int = 1
    overlap: int = 0
    parameters: int = 0
    interval: int = 0
    num_updates: int = 0


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a renter asks for besides the run itself.

    Attributes:
        pool: address with the key of the control plane.
        key: name of the renter's key.
        verify: share of blocks that are replayed [0 to 1].
        bond: what the agent has to put up [micro-credits]; None: the price of the lease.
        block_s: time between commitments [s].
        window_s: time to dispute [s].
        isolation: the weakest kind that will do.
        value_per_hour: what an hour of waiting is worth [micro-credits].
        deadline_s: the longest that the run may take, moves included [s]; None: no limit.
        most_forwarding: spent at most on large files that go through the pool, each lease [micro-credits].
        is_p2p: whether large files go directly where they can.
        may_move: whether a run that goes well moves to a better offer.
        wait_s: how long the run waits in the pool's queue until an offer can be taken [s].
        is_probed: whether an offer must have met its time at one moment with others (`joint_probe`).
        forecasts: of the run by kind of device, or why it cannot run there, where they were made.
        identity: of the job, by which later forecasts learn from this run.
        num_devices: of the run, all of one offer.
        agents: sites of the run, each at an agent of its own.
        exchanges: between them.
    """

    pool: str = ""
    key: str = "default"
    verify: float = 0.05
    bond: int | None = None
    block_s: float = 60.0
    window_s: int = 3600
    isolation: Isolation = "bubblewrap"
    value_per_hour: int = 1_000_000
    deadline_s: float | None = None
    most_forwarding: int = 0
    is_p2p: bool = True
    may_move: bool = True
    is_probed: bool = False
    wait_s: float = 0.0
    forecasts: Mapping[str, RunForecast | str] = field(default_factory=dict)
    identity: str = ""
    num_devices: int = 1
    agents: int = 1
    exchanges: Exchanges = Exchanges()

    @property
    def most_checked(self) -> float:
        """Share of blocks that may be replayed [0 to 1]: a provider without a record is checked whole."""
        return 1.0 if self.verify else 0.0

    @property
    def known_offers(self) -> set[str]:
        """Offers where the job has run: they have a forecast of their own."""
        return {word.partition("@")[2] for word in self.forecasts} - {""}

    def forecast_of(self, listed: ListedOffer) -> RunForecast | str | None:
        """The forecast of the run at an offer, or why it cannot run there; None: none was made."""
        return self.forecasts.get(forecast_word(listed, self.known_offers))

    def raw_hours_of(self, listed: ListedOffer) -> float:
        """Hours of the forecast at an offer before earlier runs corrected it; 0 where there is none."""
        forecast = self.forecast_of(listed)
        return 0.0 if forecast is None or isinstance(forecast, str) else (forecast.raw_s or forecast.run_s) / 3600

    @property
    def needs(self) -> Needs:
        """What a run needs wherever it is."""
        return Needs(
            value_per_hour=self.value_per_hour,
            least_isolation=self.isolation,
            verify_fraction=self.verify,
            checkpoint_blocked_s=0.1,
            num_devices=self.num_devices,
        )

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Terms:
        """The terms in `--place-option`.

        Raises:
            BadJob: an option has another form.
        """
        isolation = options.get("isolation", "bubblewrap")
        if isolation not in ISOLATIONS:
            raise BadJob(f"--place-option isolation={isolation}: wanted {', '.join(ISOLATIONS)}")
        return cls(
            pool=options.get("pool", ""),
            key=options.get("key", "default"),
            verify=_share(options.get("verify", "5%")),
            bond=_micro_credits(options, "bond", None),
            block_s=parse_duration(options.get("block", "60s"), "--place-option block"),
            window_s=round(parse_duration(options.get("window", "1h"), "--place-option window")),
            isolation=isolation,
            value_per_hour=_micro_credits(options, "value", cls.value_per_hour),
            deadline_s=parse_duration(options["deadline"]) if "deadline" in options else None,
            most_forwarding=_micro_credits(options, "forwarding", 0),
            is_p2p=options.get("p2p", "yes") != "no",
            may_move=options.get("move", "yes") != "no",
            wait_s=parse_duration(options["wait"], "--place-option wait") if "wait" in options else 0.0,
            is_probed=options.get("probed", "no") == "yes",
            forecasts={
                word: one if isinstance(one, str) else RunForecast(**one)
                for word, one in json.loads(options.get(FORECASTS, "{}")).items()
            },
            identity=options.get(IDENTITY, ""),
            agents=_agents(options.get("agents", "1")),
            exchanges=Exchanges(**json.loads(options.get(EXCHANGES, "{}"))),
        )

    @classmethod
    def of_handle(cls, handle: Handle) -> Terms:
        """The terms of a run that was started."""
        return replace(
            cls.of(handle["options"]),
            pool=str(handle["pool"]),
            key=str(handle["key"]),
            num_devices=int(handle.get("num_devices", 1)),
        )


def _micro_credits(options: Mapping[str, str], name: str, default: Default) -> int | Default:
    """An amount of money that an option states [micro-credits]; the default where it is not given."""
    return round(parse_money(options[name], f"--place-option {name}") * 1e6) if name in options else default


def _agents(text: str) -> int:
    """A number of agents."""
    if not (text.isdecimal() and len(text) < 4 and 1 <= int(text) <= MOST_SITES):
        raise BadJob(f"--place-option agents={text}: wanted a number, 1 to {MOST_SITES}")
    return int(text)


def _share(text: str) -> float:
    """A share of blocks.

    >>> _share("5%"), _share("0.5"), _share("none")
    (0.05, 0.5, 0.0)
    """
    if text == "none":
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else math.nan
    if not 0 <= share <= 1:
        raise BadJob(f"--verify {text}: wanted a share of the blocks, such as 5%")
    return share


def ranked_offers(
    client: PoolClient,
    target: LaunchTarget,
    terms: Terms,
    *,
    run_s: float = 3600.0,
    avoided: AbstractSet[str] = frozenset(),
    with_taken: bool = False,
) -> list[Match]:
    """Free offers that will do, by expected money and hours until the run is done; `avoided`: agents and offers.

    `with_taken`: those as well that others have now.

    Where no forecast for a kind was made, `run_s` is taken for a device like the cheapest one, and scaled by what the
    others were measured at.
    """
    documents: Any = client.state("offers")
    if with_taken:
        documents = [{**one, "is_free": one["is_free"] or bool(one["lease_id"])} for one in documents]
    listed, records = listed_offers(documents)
    usable = [
        one
        for one in listed
        if target.address in ("", "best", one.offer.offer_id)
        and target.device in ("", one.offer.device.kind)
        and not {one.agent, one.offer.offer_id} & avoided
        and (one.probed_s or not terms.is_probed)
    ]
    if not usable:
        return []
    usable.sort(key=lambda one: (one.offer.price_per_hour, one.offer.offer_id))
    flat = RunForecast(run_s=run_s, reference_flop_per_s=usable[0].offer.measured.fp32_flop_per_s)
    columns = Columns.of(usable, records, time.time(), terms.known_offers)
    needs = replace(terms.needs, num_devices=target.num_devices)
    ranking = rank_offers(columns, needs, lambda word: terms.forecasts.get(word, flat), most=len(usable))
    return list(ranking.matches)
