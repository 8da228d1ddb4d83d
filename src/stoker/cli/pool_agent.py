"""`stoker pool offer`, `pause`, `verify` and `dispute`: an owner's agent, and replays of what others claim."""

from __future__ import annotations

import os
import platform
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from stoker import api, pool
from stoker.cli.pool import KeyName, PoolWord, client_of, pool_errors
from stoker.cli.terminal import AsJson, output, print_document, printable
from stoker.errors import BadJob, NoDevice, PlaceUnreachable, RunFailed, StokerError
from stoker.records import Device, to_json
from stoker.units import format_bytes, parse_duration, parse_memory, parse_money

Folder = Annotated[
    Path | None, typer.Option("--folder", metavar="DIR", help="Where jobs run (default: ~/.local/share/stoker/agent).")
]
IsolationName = Annotated[str, typer.Option("--isolation", metavar="KIND", help="best, gvisor, podman or bubblewrap.")]
_JUDGED = {True: "equal", False: "UNEQUAL", None: "undecided"}
Lease = Annotated[str, typer.Argument(metavar="LEASE", help="Name of a lease; `stoker pool ledger` lists them.")]


def offer(
    price: Annotated[
        str, typer.Option("--price", metavar="MONEY/h", help="Credits an hour for all devices together: 0.40usd/h.")
    ],
    address: PoolWord = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the offer (default: this host's).")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="DEVICE", help="What is lent, in one lease: here, cpu, cuda:0, 8xh100, 2xcpu."
        ),
    ] = "here",
    cost: Annotated[
        str | None, typer.Option("--cost", metavar="MONEY/h", help="What an hour costs you; a lower price is refused.")
    ] = None,
    reclaim: Annotated[str, typer.Option("--reclaim", metavar="TIME", help="Notice before you take it back.")] = "2min",
    when: Annotated[
        Literal["always", "idle"], typer.Option("--when", help="idle: only while you leave the machine alone.")
    ] = "always",
    hours: Annotated[str | None, typer.Option("--hours", metavar="FROM-TO", help="Of the day, UTC: 22-6.")] = None,
    longest: Annotated[str, typer.Option("--longest", metavar="TIME", help="Longest lease.")] = "7d",
    memory: Annotated[str | None, typer.Option("--memory", metavar="BYTES", help="A job's (default: half).")] = None,
    cores: Annotated[
        float | None, typer.Option("--cores", metavar="N", min=0.1, help="A job's (default: all).")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", metavar="N", min=16, help="A job's, with threads (default: 512 for each device)."),
    ] = None,
    disk: Annotated[str, typer.Option("--disk", metavar="BYTES", help="What a job may write.")] = "10GiB",
    max_upload: Annotated[
        str | None, typer.Option("--max-upload", metavar="BYTES/day", help="Sent a day at most, such as 20GiB.")
    ] = None,
    max_temperature: Annotated[
        float | None, typer.Option("--max-temperature", metavar="CELSIUS", min=30, help="Of a lent GPU, such as 83.")
    ] = None,
    max_power: Annotated[
        float | None,
        typer.Option("--max-power", metavar="WATTS", min=1, help="Of a lent GPU, while the agent runs; needs root."),
    ] = None,
    most_bond: Annotated[
        str | None, typer.Option("--most-bond", metavar="MONEY", help="Largest bond (default: --longest at --price).")
    ] = None,
    longest_window: Annotated[
        str, typer.Option("--longest-window", metavar="TIME", help="Longest time that a bond is held after a lease.")
    ] = "1d",
    isolation: IsolationName = "best",
    folder: Folder = None,
    key: KeyName = "default",
    beat: Annotated[float, typer.Option("--beat", metavar="SECONDS", min=0.2, max=10, help="Between beats.")] = 10.0,
    measures: Annotated[
        bool, typer.Option("--measure/--no-measure", help="First measure the device, and the link.")
    ] = True,
    replays: Annotated[bool, typer.Option("--replay/--no-replay", help="Replay blocks of others for a fee.")] = True,
    probes: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Answer the pool's probes while nothing is leased.")
    ] = True,
    p2p: Annotated[
        bool, typer.Option("--p2p/--no-p2p", help="Send large files directly to renters, where a path exists.")
    ] = True,
) -> None:
    """Lend devices of this machine to a pool, until Ctrl-C; jobs run in isolation, within your limits."""
    with pool_errors():
        console = Console(stderr=True, highlight=False)

        def tell(text: str) -> None:
            console.print(Text(printable(text)), soft_wrap=True)

        client = client_of(address, key)

        devices = pool.lent_devices(device, api.attached_devices())
        lent, count = devices[0], len(devices)
        if lent.kind != "cuda" and (max_temperature is not None or max_power is not None):
            raise BadJob(
                f"--max-temperature and --max-power limit a GPU, and {lent.model} is lent",
                remedy="--cores limits what a job takes of a CPU.",
            )
        is_watched = lent.kind == "cuda" and (when == "idle" or max_temperature is not None or max_power is not None)
        if is_watched and os.environ.get("CUDA_VISIBLE_DEVICES"):
            raise BadJob(
                "CUDA_VISIBLE_DEVICES changes the numbers of GPUs, and nvidia-smi would watch and limit another one",
                remedy="Unset it; --device cuda:1 chooses a GPU.",
            )
        gpus = tuple(one.index for one in devices) if lent.kind == "cuda" else ()
        files = _device_files(gpus)
        kind = pool.best_isolation(isolation, files)
        if lent.kind == "cuda" and when == "idle" and kind.name == "podman":
            raise NoDevice(
                "--when idle cannot tell a job's use of the GPU from yours in Podman's containers",
                remedy="--isolation bubblewrap, or --when always.",
            )
        tell(f"jobs run in {kind.name}: {kind.text}")
        longest_s = round(parse_duration(longest, "--longest"))
        limits = pool.Limits(
            memory_bytes=int(parse_memory(memory)) if memory else _memory_bytes() // 2,
            cores=cores or float(len(os.sched_getaffinity(0))),
            processes=processes or 512 * count,
            disk_bytes=int(parse_memory(disk, "--disk")),
            time_s=longest_s,
        )
        if not gpus and 1 < count > limits.cores:
            raise BadJob(
                f"--device {device}: {count} processes share {limits.cores:g} cores",
                remedy="Offer as many processes as a job has cores at most; --cores sets those.",
            )
        lending = pool.Lending(
            name=name or re.sub(r"[^A-Za-z0-9.-]+", "-", platform.node()).strip("-.")[:40] or "agent",
            price_per_hour=_per_hour("--price", price),
            cost_per_hour=_per_hour("--cost", cost) if cost else 0,
            reclaim_s=round(parse_duration(reclaim, "--reclaim")),
            when=when,
            hours=_hours(hours),
            max_upload_bytes=None
            if max_upload is None
            else int(parse_memory(max_upload.removesuffix("/day"), "--max-upload")),
            max_temperature_c=max_temperature,
            max_s=longest_s,
            limits=limits,
            devices=files,
            num_devices=count,
            gpus=gpus,
            beat_s=beat,
            replays=replays,
            probes=probes,
            most_bond=round(parse_money(most_bond, "--most-bond") * 1e6) if most_bond else None,
            longest_window_s=parse_duration(longest_window, "--longest-window"),
        )
        place = _folder(folder)
        place.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            for index in gpus:  # before it is measured: the offer states what it reaches under the limit
                kept = place / ("power.json" if count == 1 else f"power-{index}.json")
                stack.enter_context(pool.limited_power(pool.LentGpu(index), max_power, kept))
            proof = _measured(devices, limits, tell) if measures else None
            with suppress(PlaceUnreachable):  # the agent says so itself, and asks again
                if p2p:
                    pool.joined_peer(client, tell=tell)
            link = _measured_link(client, place, tell) if measures else None
            agent = pool.Agent(client, lending, lent, kind, place, proof=proof, link=link, tell=tell)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    signal.signal(number, lambda *_: agent.stop())
            each = f" for all {count} devices" if count > 1 else ""
            where = f"at {price}{each} in the pool {client.address.url}"
            tell(f"offering {lending.name} {where}; Ctrl-C gives notice and ends it")
            agent.run()


def pause(folder: Folder = None, off: Annotated[bool, typer.Option("--off", help="Lend again.")] = False) -> None:
    """Take this machine back from its agent for now: a job gets its notice, saves and leaves."""
    with pool_errors():
        path = _folder(folder) / "paused"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True) if off else path.touch()
        print("lending again" if off else "paused; `stoker pool pause --off` lends again")


def verify(
    lease: Lease,
    address: PoolWord = None,
    block: Annotated[int | None, typer.Option("--block", metavar="N", min=0, help="One block (default: all).")] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Make only the updates on which the agent and verifiers differ first.")
    ] = False,
    isolation: IsolationName = "best",
    folder: Folder = None,
    key: KeyName = "default",
    as_json: AsJson = False,
) -> None:
    """Make blocks of a lease again on this machine, and compare: bit for bit in one determinism class."""
    with pool_errors():
        client = client_of(address, key)

        device = api.resolve_place("here", api.attached_devices())
        count = client.lease(lease).num_devices
        lent = pool.lent_devices(f"{count}xhere", api.attached_devices())
        files = _device_files(tuple(one.index for one in lent) if device.kind == "cuda" else ())
        kind = pool.best_isolation(isolation, files)
        limits = pool.Limits(memory_bytes=_memory_bytes() // 2, cores=float(len(os.sched_getaffinity(0))))
        pool.joined_peer(client, keeps=True)  # its blocks may be on this machine, or on its renter's
        host = pool.Host(isolation=kind, limits=limits, devices=files)
        shown, checks = client.lease(lease), _folder(folder) / "checks"
        numbers = [block] if block is not None else range(len(shown.commitments))
        own_class, found = pool.determinism_class(device, count), list[dict[str, Any]]()
        with output(for_json=as_json):
            for number in numbers:
                if update:
                    found += _updates(client, shown, number, checks, host, own_class, is_quiet=as_json)
                    continue
                verdict = pool.replay_lease(client, lease, number, folder=checks, host=host, own_class=own_class)
                others = pool.evidence_of(client, shown, number, checks)
                found.append(
                    {
                        "block": number,
                        "equal": verdict.equal,
                        "why": verdict.why,
                        "made": verdict.made,
                        "others": others,
                    }
                )
                if not as_json:
                    print(f"block {number}: {_JUDGED[verdict.equal]}: {verdict.why}")
                    for other in others:
                        agrees = ", as here" if verdict.made and other["made"] == verdict.made else ""
                        what = f" update {other['update']:,}" if "update" in other else ""
                        judged = f"{_JUDGED[other['equal']]}{agrees}"
                        print(f"  {pool.short(other['verifier'])}:{what} {judged}: {other['why']}")
        if as_json:
            print_document({"lease": lease, "blocks": found})
        if any(verdict["equal"] is False for verdict in found):
            raise typer.Exit(RunFailed.exit_code)


def dispute(
    lease: Lease,
    address: PoolWord = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="What is wrong.")] = "",
    key: KeyName = "default",
) -> None:
    """Hold the pay of a lease until other agents have replayed what you doubt."""
    with pool_errors():
        client = client_of(address, key)

        client.post(pool.Disputed(lease_id=lease, reason=reason))
        print(f"the pay of {lease} is held until it is settled; `stoker pool ledger` shows what comes of it")


def _updates(
    client: pool.PoolClient,
    lease: pool.ShownLease,
    number: int,
    folder: Path,
    host: pool.Host,
    own_class: str,
    *,
    is_quiet: bool,
) -> list[dict[str, Any]]:
    """Make the updates of a block that were found, alone, as an arbiter does."""
    found = []
    for one in lease.found_updates:
        if one.block != number:
            continue
        verdict = pool.replay_lease(
            client, one.lease_id, number, against=one.verifier, folder=folder, host=host, own_class=own_class
        )
        found.append({**to_json(one), "equal": verdict.equal, "why": verdict.why, "made": verdict.made})
        if not is_quiet:
            print(f"{one.words()}\n  here: {_JUDGED[verdict.equal]}: {verdict.why}")
    return found


def _folder(given: Path | None) -> Path:
    return pool.data_folder("agent") if given is None else given.absolute()


def _per_hour(option: str, text: str) -> int:
    """Micro-credits an hour."""
    amount, _, unit = text.partition("/")
    if unit not in ("", "h", "hour"):
        raise BadJob(f"{option} {text}: wanted an amount an hour, such as 0.40usd/h")
    return round(parse_money(amount, option) * 1e6)


def _hours(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,2})-(\d{1,2})", text.strip())
    if match is None or max(int(match[1]), int(match[2])) > 23:
        raise BadJob(f"--hours {text}: wanted two hours of the day, such as 22-6")
    return int(match[1]), int(match[2])


def _memory_bytes() -> int:
    return api.attached_cpu().memory_bytes


def _measured(devices: Sequence[Device], limits: pool.Limits, tell: Callable[[str], None]) -> pool.HardwareProof:
    """What the weakest of the devices shows while all are measured at once; a job's limits hold on a CPU.

    Raises:
        NoDevice: one does not pass.
    """
    lent, count = devices[0], len(devices)
    tell(f"measuring {count} × {lent.model}" if count > 1 else f"measuring {lent.model}")
    is_gpu = lent.kind == "cuda"
    claimed = pool.probed_bytes(lent.memory_bytes if is_gpu else limits.memory_bytes // count, is_cpu=not is_gpu)
    with ExitStack() as stack:
        cores = None if is_gpu else limits.cores / count
        asks = [stack.enter_context(pool.LocalDevice(cores)) for _ in devices]
        proof = pool.prove_together(asks, [one.torch_name for one in devices], memory_bytes=claimed)
    if not proof.is_passed:
        raise NoDevice(
            f"{lent.model} did not pass its own measurement: {proof.why}",
            remedy="Offer less memory, or look at the device with `stoker doctor`.",
        )
    shown = format_bytes(proof.proved_bytes)
    tell(f"{proof.flop_per_s / 1e9:,.1f} GFLOP/s in fp32, {shown} shown: {proof.why}")
    return proof


def _measured_link(client: pool.PoolClient, folder: Path, tell: Callable[[str], None]) -> pool.MeasuredLink | None:
    """The link to the pool; None where it cannot be measured now, which is no reason not to lend."""
    try:
        link = pool.measured_link(client, folder)
    except StokerError as problem:
        tell(f"the link to the pool is not measured: {problem.message}")
        return None
    up, down = (format_bytes(rate) for rate in (link.upload_bytes_per_s, link.download_bytes_per_s))
    tell(f"the link to the pool: {up}/s up, {down}/s down")
    return link


def _device_files(gpus: Sequence[int]) -> tuple[str, ...]:
    """Files below /dev that a job needs for GPUs of these numbers; it sees no other GPU."""
    if not gpus:
        return ()
    shared = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
    return (*(f"/dev/nvidia{index}" for index in gpus), *shared)
