"""`stoker pool serve`, `offers`, `ledger`, `wallet` and `audit`: a pool's control plane, and its renters' view."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from stoker import api, pool
from stoker.cli.terminal import (
    AsJson,
    Settings,
    column_table,
    load_job,
    output,
    print_document,
    print_table,
    printable,
    waiting,
)
from stoker.errors import BadJob, BadRun, DoesNotFit, ServiceError
from stoker.records import to_json
from stoker.units import format_seconds, parse_duration, parse_memory, parse_money

_CHAIN_PACKAGES = frozenset({"web3", "eth_account", "eth_abi", "eth_tester", "eth"})
PoolWord = Annotated[
    str | None,
    typer.Option("--pool", metavar="URL#KEY", help="The pool's address; default: STOKER_POOL.", show_default=False),
]
KeyName = Annotated[str, typer.Option("--key", metavar="NAME", help="Which of your keys acts.")]
PoolFolder = Annotated[
    Path | None,
    typer.Option("--folder", metavar="DIR", help="The control plane's folder (default: ~/.local/share/stoker/pool)."),
]


@contextmanager
def pool_errors() -> Iterator[None]:
    """Errors of the block as Stoker's: a missing module names the extra that brings it, a disk's error its file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as problem:
        if problem.filename is None:  # no file's: a network's, or a certificate's
            raise BadRun(str(problem)) from problem
        raise BadRun(
            f"{problem.filename}: {problem.strerror}", remedy="Is that disk full, or closed to this user?"
        ) from problem
    except ModuleNotFoundError as problem:
        package = (problem.name or "").partition(".")[0]
        extra = "pool,chain" if package in _CHAIN_PACKAGES else "p2p" if package == "iroh" else "pool"
        raise ServiceError(
            f"the pool needs {problem.name}, which is not installed here", remedy=f"pip install 'stoker[{extra}]'"
        ) from problem


def client_of(address: str | None, key: str | None = None) -> pool.PoolClient:
    """A client of the pool at an address, or of the one in STOKER_POOL, with one of this user's keys."""
    return pool.PoolClient(pool.PoolAddress.parse(address), None if key is None else pool.own_key(key))


def _operator(address: str | None, folder: Path | None) -> pool.PoolClient:
    """A client of the pool with the key of its operator, which is in the control plane's folder."""
    client = client_of(address)
    client.key = pool.read_key((pool.data_folder("pool") if folder is None else folder) / "control.key")
    return client


def _amount(text: str, option: str) -> float:
    """Money [USD], of which there may be none."""
    return 0.0 if text.strip() in ("0", "0usd") else parse_money(text, option)


def pool_serve(
    folder: PoolFolder = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Beyond 127.0.0.1: with TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 8430,
    tls: Annotated[bool, typer.Option("--tls", help="TLS on this machine's loopback as well.")] = False,
    name: Annotated[str, typer.Option("--name", help="The name of a new pool.")] = "pool",
    is_open: Annotated[bool, typer.Option("--open", help="New pool: anyone may act, without being admitted.")] = False,
    verdicts: Annotated[
        int, typer.Option("--verdicts-to-slash", min=1, max=9, help="New pool: replays that must find a cheat.")
    ] = 2,
    window: Annotated[
        str | None, typer.Option("--least-window", metavar="TIME", help="New pool: shortest time to dispute a result.")
    ] = None,
    chain: Annotated[
        str | None, typer.Option("--chain", metavar="URL", help="A node of the chain that has the pool's contract.")
    ] = None,
    contract: Annotated[
        str | None, typer.Option("--contract", metavar="ADDRESS", help="The contract: it gets the log's hourly roots.")
    ] = None,
    chain_key: Annotated[
        str,
        typer.Option(
            "--chain-key",
            metavar="FILE",
            envvar="STOKER_CHAIN_KEY",
            help="Its arbiter's key, or URL#ADDRESS of a signer.",
        ),
    ] = "",
    confirmations: Annotated[
        int, typer.Option("--chain-confirmations", metavar="N", min=0, help="Blocks above what is believed.")
    ] = 0,
    money_in_contract: Annotated[
        bool, typer.Option("--money-in-contract", help="New pool: deposits and bonds are in the contract as well.")
    ] = False,
    p2p: Annotated[
        bool, typer.Option("--p2p", help="Large files go directly: peers meet at UDP, the same port and the next one.")
    ] = False,
    forward_price: Annotated[
        str, typer.Option("--forward-price", metavar="USD", help="New pool: a GiB of large files through the pool.")
    ] = "0",
    forward_quota: Annotated[
        str | None, typer.Option("--forward-quota", metavar="BYTES", help="New pool: of them for one lease, at most.")
    ] = None,
    probe_every: Annotated[
        str,
        typer.Option("--probe-every", metavar="TIME", help="Idle devices prove themselves at one moment; or never."),
    ] = "10min",
) -> None:
    """Serve a pool: offers, leases, the ledger and blobs; one process and one folder."""
    with pool_errors():
        rules = pool.Founded(
            name=name,
            is_open=is_open,
            verdicts_to_slash=verdicts,
            least_window_s=0 if window is None else int(parse_duration(window, "--least-window")),
            forward_price=round(_amount(forward_price, "--forward-price") * pool.CREDIT),
            forward_quota_bytes=0 if forward_quota is None else int(parse_memory(forward_quota, "--forward-quota")),
        )
        if (chain is None) != (contract is None) or (money_in_contract and chain is None):
            raise BadJob("a contract is named with --chain URL and --contract ADDRESS, both")
        settings = None
        if chain is not None and contract is not None:
            settings = pool.ChainSettings(
                url=chain, contract=contract, key=chain_key, confirmations=confirmations, has_money=money_in_contract
            )
        pool.serve_pool(
            pool.data_folder("pool") if folder is None else folder,
            host=host,
            port=port,
            rules=rules,
            has_tls=tls,
            chain=settings,
            probe_every_s=None if probe_every == "never" else parse_duration(probe_every, "--probe-every"),
            is_p2p=p2p,
            announce=lambda address: print(f"stoker pool: {address}", flush=True),
        )


def pool_wallet(
    address: PoolWord = None,
    key: KeyName = "default",
    grant: Annotated[
        list[str] | None,
        typer.Option("--grant", metavar="KEY=AMOUNT", help="Operator: admit a key and give it credits, such as 5usd."),
    ] = None,
    folder: PoolFolder = None,
    as_json: AsJson = False,
) -> None:
    """Show your key and what it has; with --grant, as the pool's operator, give credits to a key."""
    with pool_errors():
        if grant:
            operator = _operator(address, folder)
            for word in grant:
                account, equals, amount = word.partition("=")
                if not equals:
                    raise BadJob(f"--grant {word}: wanted KEY=AMOUNT, such as {pool.own_key(key).public}=5usd")
                try:
                    granted = round(_amount(amount, "--grant") * pool.CREDIT)
                    body = pool.Deposited(account=account.strip(), amount=granted)
                except ValueError as problem:
                    raise BadJob(f"--grant {word}: {problem}") from problem
                operator.post(body)
                if not as_json:
                    Console(highlight=False).print(
                        f"granted  {pool.credits_text(body.amount)} to {body.account}", soft_wrap=True
                    )
        client = client_of(address, key)
        assert client.key is not None
        account = client.key.public
        balances = client.state("balances")["balances"]
        escrow = sum(lease.escrow for lease in client.leases(renter=account, unsettled="1"))
        bonds = sum(lease.bond_held for lease in client.leases(agent=account, unsettled="1"))
        if as_json:
            print_document({"key": account, "balance": balances.get(account, 0), "in_escrow": escrow, "bonds": bonds})
            return
        console, rules = Console(highlight=False), client.rules()
        console.print(f"key      {account}")
        console.print(
            f"balance  {pool.credits_text(balances.get(account, 0))}"
            if account in balances
            else f"balance  0 credits{'' if rules.is_open else '; the key is not admitted'}: the pool's operator runs "
            f"stoker pool wallet --grant {account}=AMOUNT",
            soft_wrap=True,
        )
        console.print(f"held     {pool.credits_text(escrow)} in escrow, {pool.credits_text(bonds)} in bonds")
        if contract := rules.contract:
            console.print(f"money    in the contract {contract}: stoker pool contract show", soft_wrap=True)


def pool_team(
    team: Annotated[str, typer.Argument(metavar="NAME", help="The team; an earlier one of that name is replaced.")],
    member: Annotated[list[str] | None, typer.Option("--member", metavar="KEY", help="A renter; repeatable.")] = None,
    weight: Annotated[float, typer.Option("--weight", help="Its share against others' where devices are short.")] = 1.0,
    priority: Annotated[int, typer.Option("--priority", min=0, help="Higher comes first, and preempts.")] = 0,
    quota: Annotated[int, typer.Option("--quota", metavar="N", min=0, help="Devices at a time; 0: no limit.")] = 0,
    address: PoolWord = None,
    folder: PoolFolder = None,
) -> None:
    """As the pool's operator, make a team: who, its share, its priority, its quota."""
    with pool_errors():
        try:
            body = pool.TeamMade(
                team=team, members=tuple(member or ()), weight=weight, priority=priority, most_devices=quota
            )
        except ValueError as problem:
            raise BadJob(f"stoker pool team: {problem}") from problem
        receipt = _operator(address, folder).post(body)
        print(f"team {team} of {len(body.members)}, event {receipt.seq}")


def pool_ledger(
    address: PoolWord = None,
    after: Annotated[int, typer.Option("--after", min=0, metavar="N", help="Only events after number N.")] = 0,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what happens.")] = False,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write the log, for `stoker pool audit FILE`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print every event of a pool: who did what, and what money it moved."""
    with pool_errors():
        client, last = client_of(address), after
        console = Console(highlight=False)
        lines: list[str] = []
        while True:
            events = client.events(last, wait_s=30.0 if follow and not export else 0.0)
            for event in events:
                last = event.seq
                if export is not None:
                    lines.append(pool.canonical(event.document()).decode() + "\n")
                elif as_json:
                    print(json.dumps({**event.document(), "hash": event.hash}), flush=True)
                else:
                    console.print(_event_line(event), soft_wrap=True)
            if not events and (export is not None or not follow):
                break
        if export is not None:
            api.write_atomic(export, "".join(lines), what="the log", error=BadRun)


def _event_line(event: pool.Event) -> Text:
    at = datetime.fromtimestamp(event.received_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return Text.assemble(
        (f"{event.seq:>6}  {at}  ", "dim"),
        (f"{event.kind:<11}", "bold"),
        (f" {pool.short(event.actor)}  ", "dim"),
        printable(pool.event_words(event)),
    )


def pool_audit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A pool's log.db, or what `ledger --export` wrote.")],
    head: Annotated[
        str | None, typer.Option("--head", metavar="HASH", help="An event that the log must have, from a receipt.")
    ] = None,
    chain: Annotated[
        str | None, typer.Option("--chain", metavar="URL", help="Compare its roots with those in --contract.")
    ] = None,
    contract: Annotated[str | None, typer.Option("--contract", metavar="ADDRESS", help="Where the roots are.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a log: check every hash, signature, transition and balance, and name the first event that is wrong."""
    with pool_errors():
        if (chain is None) != (contract is None):
            raise BadJob("a contract is named with --chain URL and --contract ADDRESS, both")
        state = pool.State()
        result, num_roots = pool.audit(file, state=state, head=head), 0
        if chain is not None and contract is not None:
            num_roots, problem = pool.differing_roots(
                pool.ChainSettings(url=chain, contract=contract).connected(), state.roots
            )
            result = replace(result, problem=result.problem or problem)
        updates = [found for lease in state.leases.values() for found in lease.found_updates]
        if as_json:
            print_document(
                {
                    "events": result.num_events,
                    "head": result.head,
                    "problem": result.problem,
                    "bad_event": result.bad_event,
                    "pool": state.operator,
                    "deposited": state.accounts.deposited,
                    "balances": state.accounts.balances,
                    "roots_on_chain": num_roots,
                    "updates_in_dispute": [to_json(found) for found in updates],
                }
            )
        else:
            console = Console(highlight=False)
            console.print(f"{result.num_events} events are right; the last one's hash is {result.head}", soft_wrap=True)
            console.print(f"the pool's key is {state.operator or 'not known'}", soft_wrap=True)
            console.print(
                f"{pool.credits_text(state.accounts.deposited)} deposited, and as much held by "
                f"{len(state.accounts.balances)} accounts"
            )
            for found in updates:
                console.print(printable(f"lease {found.lease_id}, {found.words()}"), soft_wrap=True)
            if chain is not None:
                console.print(f"{num_roots} roots are the same in the contract {contract}", soft_wrap=True)
            if result.problem:
                console.print(Text(f"wrong: {printable(result.problem)}", "bold red"), soft_wrap=True)
        if result.problem:
            raise typer.Exit(BadRun.exit_code)


def pool_offers(
    address: PoolWord = None,
    job_file: Annotated[
        Path | None, typer.Option("--for", metavar="JOB", help="Rank them for a job: money and hours until it is done.")
    ] = None,
    settings: Settings = None,
    value: Annotated[
        str, typer.Option("--value", metavar="USD", help="With --for: what an hour of waiting is worth to you.")
    ] = "1usd",
    max_cost: Annotated[str | None, typer.Option("--max-cost", metavar="USD", help="With --for: the most.")] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="TIME", help="With --for: the longest, such as 12h.")
    ] = None,
    verify: Annotated[
        float, typer.Option("--verify", metavar="PERCENT", min=0, max=100, help="With --for: blocks to be replayed.")
    ] = 5.0,
    isolation: Annotated[
        str, typer.Option("--isolation", metavar="KIND", help="With --for: bubblewrap, podman or gvisor, at least.")
    ] = "bubblewrap",
    show_all: Annotated[bool, typer.Option("--all", help="Also what is taken, lapsed, or without its agent.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what a pool offers, the cheapest hour first; for a job, in the order of money and hours until it is done."""
    with pool_errors():
        client = client_of(address)
        offers = client.state("offers")
        if job_file is not None:
            needs = {
                "value": _amount(value, "--value"),
                "verify": verify / 100,
                "max_cost": None if max_cost is None else parse_money(max_cost),
                "isolation": isolation,
                "deadline_s": None if deadline is None else parse_duration(deadline),
            }
            _offers_for(job_file, settings, offers, client, needs, as_json=as_json)
            return
        shown = [offer for offer in offers if show_all or (offer["is_free"] and offer["is_present"])]
        shown.sort(key=lambda offer: pool.read_offer(offer)[0].offer.price_per_hour)
        if as_json:
            print_document(shown)
            return
        _render_offers(shown, len(offers) - len(shown), Console())


def _offers_for(
    job_file: Path,
    settings: list[str] | None,
    documents: list[dict[str, Any]],
    client: pool.PoolClient,
    wanted: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Rank offers for a job, and print them."""
    if wanted["isolation"] not in pool.ISOLATIONS:
        raise BadJob(f"--isolation {wanted['isolation']}: wanted {', '.join(pool.ISOLATIONS)}")
    needs = pool.Needs(
        num_devices=0,
        value_per_hour=round(wanted["value"] * pool.CREDIT),
        verify_fraction=wanted["verify"],
        least_isolation=wanted["isolation"],
        deadline_s=wanted["deadline_s"],
        max_credits=None if wanted["max_cost"] is None else round(wanted["max_cost"] * pool.CREDIT),
    )
    offers, records = pool.listed_offers(documents)
    with waiting("forecasting the job on what is offered", quiet=as_json), output(for_json=as_json):
        job, entry = load_job(job_file, settings)
        leases = pool.leases_before(client, entry)
        ranking = pool.rank_for_job(job, entry, offers, records, needs=needs, now_s=time.time(), leases=leases)
    close = pool.worth_probing(ranking, needs.value_per_hour)
    probes = [one.listed.offer for one in close if one.forecast and one.forecast.basis != "history"]
    if as_json:
        print_document({**to_json(ranking), "probes": [offer.offer_id for offer in probes]})
    else:
        _render_ranking(ranking, Console())
        if ranking.best is not None and ranking.best.listed.offer.device.count > 1:
            word = pool.offer_word(ranking.best.listed.offer)
            Console().print(Text(f"`--on pool` asks for one device; the best: --on {word}"), soft_wrap=True)
        for offer in probes:
            text = (
                f"a minute there may change the order: stoker train {job_file} --on {pool.offer_word(offer)} "
                "--time-limit 60s"
            )
            Console().print(Text(text), style="dim", soft_wrap=True)
    if ranking.best is None:
        raise typer.Exit(DoesNotFit.exit_code)


def _render_ranking(ranking: pool.Ranking, console: Console) -> None:
    titles = ("offer", "device", ">an hour", ">by price", ">done in", ">in all", ">in 8 of 10", ">risk", "why")
    table = column_table(*titles, folds={"why"})
    for number, match in enumerate(ranking.matches):
        offer = match.listed.offer
        interval = f"{pool.credits_text(match.low_credits).split()[0]} to {pool.credits_text(match.high_credits)}"
        table.add_row(
            offer.offer_id,
            Text(printable(f"{offer.device.count} × {offer.device.kind}")),
            pool.credits_text(offer.price_per_hour),
            f"{match.price_rank}.",
            format_seconds(match.hours * 3600),
            pool.credits_text(match.credits),
            interval,
            f"{100 * match.risk:.0f} %",
            Text(printable(match.why)),
            style="" if number else "bold",
        )
    print_table(table, console)
    for why, count in ranking.refused.items():
        console.print(Text(f"{count} cannot be taken: {printable(why)}"), style="dim", soft_wrap=True)
    if ranking.best is None:
        console.print("no offer can be taken", style="yellow")


def _each(price: int, count: int) -> str:
    """What a device of several costs, for brackets."""
    return f" ({pool.credits_text(round(price / count)).split()[0]} each)" if count > 1 else ""


def _render_offers(shown: list[dict[str, Any]], num_hidden: int, console: Console) -> None:
    figures = (">an hour", "isolation", ">notice", ">jobs", ">lost", ">slashed")
    table = column_table("offer", "device", *figures, "probed", "network", "agent", "")
    for one in shown:
        offer, record = one["offer"], one["record"]
        clash = one.get("clashes_with", "")
        status = "taken" if one["lease_id"] else "lapsed" if not one["is_free"] else "" if one["is_present"] else "away"
        status = f"not together with {clash}" if clash and not one["lease_id"] else status
        table.add_row(
            offer["offer_id"],
            Text(printable(f"{offer['device']['count']} × {offer['device']['kind']}")),
            pool.credits_text(offer["price_per_hour"]) + _each(offer["price_per_hour"], offer["device"]["count"]),
            offer["isolation"],
            format_seconds(offer["reclaim_s"]),
            str(record["finished"]),
            str(record["lost"] + record["left"]),
            str(record["slashed"]),
            "yes" if one.get("probed_s") else "no",
            one.get("network") or "through the pool",
            Text(pool.short(one["agent"]), "dim"),
            Text(status, "yellow"),
        )
    print_table(table, console)
    if num_hidden:
        console.print(f"{num_hidden} more are taken, lapsed or without their agent: --all shows them", style="dim")
