"""Folders of runs for `stoker ui` to show: finished, live, failed, elsewhere, very long, and hostile ones."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
import random
import time
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stoker.records import Candidate, Estimate, Event, JobSpec, Price, Run, dumps
from stoker.records.data_check import DataCheck, Finding, SplitFacts
from stoker.records.launch import Launch, LaunchState
from stoker.records.study import Parameter, StudySettings, StudyTrial
from stoker.store.run_files import TRIAL
from tests.reporting import story

STATUSES = ("finished", "finished", "finished", "finished", "finished", "failed", "unfinished", "finished")
NOW_S = story.START_S


def write_run(  # noqa: PLR0913 - what runs differ in
    root: Path,
    name: str,
    events: Sequence[Event] | bytes,
    *,
    status: str = "finished",
    spec: JobSpec | None = None,
    lr: float = 0.02,
    seed: int = 0,
    metrics: dict[str, float] | None = None,
    age_s: float = 0.0,
    usd_per_hour: float | None = None,
    launch: Launch | None = None,
    failure: str | None = None,
    samples: int | None = None,
    tags: Sequence[str] = (),
    wall_s: float = 233.0,
) -> Path:
    """A run's directory, with records as `stoker train` writes them."""
    path = root / name
    path.mkdir(parents=True)
    spec = spec or story.spec("fashion-resnet", seed=seed)
    spec = dataclasses.replace(spec, parameters={**spec.parameters, "lr": lr})
    decision = story.decision()
    if usd_per_hour is not None:
        price = Price(
            device="rtx-4090",
            provider="example",
            usd_per_hour=usd_per_hour,
            market="on demand",
            source="example",
            seen_on="2026-11-01",
        )
        decision = dataclasses.replace(
            decision, candidates=(dataclasses.replace(decision.chosen, price=price), *decision.candidates[1:])
        )
    created = datetime.fromtimestamp(time.time() - 600 - age_s, tz=UTC).isoformat(timespec="seconds")
    known = {"valid/accuracy": 0.9326, "test/accuracy": 0.92614, "test/loss": 0.2291} if metrics is None else metrics
    run = Run(
        name=name.rsplit("/", 1)[-1],
        status=status,
        created_at=created,
        spec_digest=spec.digest(),
        total_samples=story.TOTAL_SAMPLES,
        metrics=known if status == "finished" else {},
        failure=failure,
        samples=(story.TOTAL_SAMPLES if status == "finished" else samples or 0),
        wall_s=wall_s,
        updates=636 if status == "finished" else 0,
    )
    for file, record in (
        ("spec.json", spec),
        ("plan.json", decision),
        ("environment.json", story.ENVIRONMENT),
        ("device.json", story.DEVICE),
        ("coupling.json", story.COUPLING),
        ("run.json", run),
    ):
        (path / file).write_text(dumps(record) + "\n")
    if launch is not None:
        (path / "launch.json").write_text(dumps(launch) + "\n")
    if tags:
        (path / "annotations.json").write_text(json.dumps({"tags": list(tags), "note": "", "is_archived": False}))
    (path / "events.jsonl").write_bytes(events if isinstance(events, bytes) else as_log(events))
    return path


def as_log(events: Sequence[Event], later_s: float = 0.0) -> bytes:
    """Events as a run's log, `later_s` seconds later than they say."""
    return "".join(dumps(dataclasses.replace(one, at=one.at + later_s), indent=None) + "\n" for one in events).encode()


def sign(path: Path, pid: int) -> None:
    """Let a run look as if process `pid` of this machine trained it."""
    holder = {"pid": pid, "host": os.uname().nodename, "since": "2026-11-25T20:00:00+00:00"}
    (path / "lock").write_text(json.dumps(holder))


def many(root: Path, count: int) -> None:
    """`count` runs of some jobs, with some hundred events each; most are finished."""
    noise = random.Random(0)
    logs = {status: [as_log(_variant(status, seed)) for seed in range(4)] for status in set(STATUSES)}
    for number in range(count):
        status = STATUSES[number % len(STATUSES)]
        lr, quality = round(10 ** noise.uniform(-3, -0.5), 4), noise.gauss(0, 0.01)
        write_run(
            root,
            f"{('resnet', 'gpt', 'lstm', 'mlp')[number % 4]}-{number:06x}",
            logs[status][number % 4],
            status=status,
            spec=story.spec(("fashion-resnet", "tiny-gpt", "sent-lstm", "digits-mlp")[number % 4]),
            lr=lr,
            age_s=number * 941.0,
            metrics={"valid/accuracy": 0.92 + quality, "test/accuracy": 0.915 + quality, "test/loss": 0.25 - quality},
            usd_per_hour=0.44 if number % 3 == 0 else None,
            tags=("baseline",) if number % 11 == 0 else (),
            failure="the loss is nan at update 138 (70,656 samples)" if status == "failed" else None,
            wall_s=233.0 * noise.uniform(0.6, 3),
        )


def _variant(status: str, seed: int) -> list[Event]:
    teller = story.Teller(seed=seed)
    teller.begin()
    teller.train(story.TOTAL_SAMPLES if status == "finished" else 70_144 + 40_000 * seed)
    if status == "finished":
        teller.finish()
    elif status == "unfinished":
        teller.tell("stopped", 0.1, reason="SIGTERM", samples=teller.samples)
    return teller.events


def long_log(count: int) -> bytes:
    """A log with `count` progress events, 0.5 s apart."""
    began = story.Teller()
    began.begin()
    noise, total = random.Random(1), count * 512
    fields = {
        "samples": "@d",
        "total_samples": total,
        "updates": "@d",
        "epoch": "@d",
        "loss": "@r",
        "lr": "@r",
        "samples_per_s": "@r",
        "eta_s": "@r",
        "wall_s": "@r",
        "split_s": {"data": 0.0125, "update": 0.4875, "evaluation": 0.0, "checkpoint": 0.0},
        "resident_bytes": "@d",
        "grad_norm": "@r",
    }
    event = {"record": "Event", "schema": 1, "kind": "progress", "at": "@r", "fields": fields}
    template = json.dumps(event).replace('"@', "%") + "\n"
    for letter in "dr":  # the closing quotes of what stands for numbers
        template = template.replace(f'%{letter}"', f"%{letter}")
    lines = []
    for number in range(1, count + 1):
        loss = 0.17 + 2.1 * math.exp(-number / (0.1 * count)) + 0.02 * noise.random()
        lines.append(
            template
            % (
                NOW_S + number * 0.5,
                number * 512,
                number,
                number * 512 // 54_000,
                loss,
                0.02 * (1 - number / count),
                1450 + 60 * noise.random(),
                (count - number) * 0.5,
                number * 0.5,
                900_000_000 + number % 1000 * 1000,
                1 + noise.random(),
            )
        )
    return as_log(began.events) + "".join(lines).encode()


def show(root: Path, pid: int = 0) -> None:
    """One of everything, for pictures and checks of accessibility; process `pid`, or this one, trains the live run."""
    root.mkdir(parents=True, exist_ok=True)
    many(root, 40)
    events = _live_events()
    live = write_run(
        root,
        "fashion-resnet-live",
        as_log(events, time.time() - events[-1].at),
        status="unfinished",
        usd_per_hour=1.89,
        age_s=-60,
        tags=("paper", "sweep-3"),
        wall_s=0.0,
    )
    sign(live, pid or os.getpid())
    write_pictures(live)
    resumed = write_run(root, "fashion-resnet-resumed", story.killed_and_resumed(), usd_per_hour=1.89, age_s=-50)
    (resumed / "bottleneck.json").write_text(dumps(bottleneck()) + "\n")
    write_examples(resumed)
    for seed in (1, 2, 3):
        write_run(
            root,
            f"fashion-resnet-seed{seed}",
            _variant("finished", seed),
            seed=seed,
            age_s=-40,
            metrics={"valid/accuracy": 0.93 + seed / 1000, "test/accuracy": 0.925 + seed / 900},
        )
    states = (
        LaunchState(
            phase="queued",
            why="17 jobs are before it",
            evidence="squeue: PENDING (Priority)",
            starts_in_s=5400,
            at="2026-01-01T00:00:00+00:00",
        ),
    )
    launch = Launch(
        run="llama-shards",
        place="slurm:a100",
        kind="slurm",
        handle={"job": 4711},
        identity="1d",
        code_digest="c0de",
        environment_digest="",
        arguments=(),
        submitted_at="2026-01-01T00:00:00+00:00",
        price_per_h=8.4,
        max_cost=120.0,
        states=states,
    )
    write_run(
        root, "llama-shards", as_log(story.young_run()[:1]), status="unfinished", launch=launch, age_s=-30, wall_s=0.0
    )
    moved = (
        *states,
        LaunchState(phase="running", why="node n17 was given", at="2026-01-01T01:30:00+00:00"),
        LaunchState(
            phase="preempted",
            why="a job of higher priority took n17",
            evidence="sacct: PREEMPTED",
            at="2026-01-01T02:10:00+00:00",
            restarts=1,
        ),
    )
    write_run(
        root,
        "llama-shards-2",
        _variant("unfinished", 1),
        status="unfinished",
        age_s=-20,
        wall_s=95.0,
        launch=dataclasses.replace(launch, run="llama-shards-2", states=moved),
    )
    study(root / "digits-search")
    (root / "devices.json").write_text(dumps(devices_plan()) + "\n")
    check(root / "images-check")


def _live_events() -> list[Event]:
    teller = story.Teller(seed=3)
    teller.begin()
    for number in range(1, 9):
        teller.train(number * 24_576)
        scalars = {
            "gate": [
                [teller.samples - 12_288 + step, 0.5 + 0.4 * math.sin(number + step / 9000)]
                for step in range(0, 12_289, 1536)
            ]
        }
        teller.tell(
            "logged",
            samples=teller.samples,
            scalars=scalars,
            images=[{"name": "generated", "samples": teller.samples, "file": f"{number}.png"}],
            texts=[
                {
                    "name": "sample",
                    "samples": teller.samples,
                    "text": f"epoch {number}: the quick brown fox jumps over the lazy dog",
                }
            ],
        )
    return teller.events


def png(width: int, height: int, seed: int) -> bytes:
    """A small picture: stripes that move with `seed`."""
    rows = b"".join(
        b"\0" + bytes((128 + int(100 * math.sin((x + seed * 3) / 3 + y / 5))) % 256 for x in range(width))
        for y in range(height)
    )

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x00\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def write_pictures(path: Path) -> None:
    """The pictures that the live run's log names."""
    (path / "logged").mkdir()
    for number in range(1, 9):
        (path / "logged" / f"{number}.png").write_bytes(png(28, 28, number))


def bottleneck() -> Any:
    """What held a run back."""
    from stoker.records import Bottleneck, Share  # noqa: PLC0415 - as below

    return Bottleneck(
        bound_by="arithmetic",
        sentence="Bound by arithmetic: products and convolutions took 71 % of the training time.",
        shares=tuple(
            Share(what=what, value=value)
            for what, value in (("arithmetic", 160.0), ("memory bandwidth", 31.0), ("data", 14.0), ("evaluation", 12.0))
        ),
        achieved=(),
        mfu=0.58,
        evidence=("250 GFLOP/s of 430 GFLOP/s measured here",),
        advice="Evaluate half as often.",
        gain=Estimate(value=0.05, low=0.04, high=0.06, unit="of the training time", basis="measured here"),
    )


def write_examples(path: Path) -> None:
    """Held-out samples with a confusion matrix."""
    from stoker.records.run import Example, ExampleSet, ExampleSets  # noqa: PLC0415 - likewise

    names = ("shirt", "trouser", "pullover", "dress", "coat", "sandal")
    noise = random.Random(4)
    confusion = tuple(
        tuple(880 + noise.randrange(60) if row == column else noise.randrange(40) for column in range(6))
        for row in range(6)
    )
    examples = tuple(
        Example(
            index=number,
            target=names[number % 6],
            output=f"{names[(number + number % 2) % 6]} (81 %)",
            loss=3.0 - 0.2 * number,
            picture=base64.b64encode(png(28, 28, number)).decode(),
            name=f"test/{number:05d}.png",
        )
        for number in range(8)
    )
    sets = ExampleSets(
        sets=(ExampleSet(split="test", num_samples=10_000, worst=examples, confusion=confusion, classes=names),)
    )
    (path / "examples.json").write_text(dumps(sets) + "\n")


def study(path: Path) -> None:
    """A study of three settings with 24 trials."""
    path.mkdir()
    space = (
        Parameter(name="lr", kind="log", low=0.001, high=0.3),
        Parameter(name="width", kind="int", low=16, high=256),
        Parameter(name="augment", kind="choice", choices=("none", "flip", "shift")),
    )
    settings = StudySettings(
        name="digits-search",
        job="digits.py",
        job_digest="d1",
        fixed={},
        space=space,
        objective="valid/accuracy",
        higher_is_better=True,
        sampler="tpe",
        pruner="asha",
        seed=0,
        on="here",
        first_samples=54_000,
        total_samples=story.TOTAL_SAMPLES,
    )
    (path / "study.json").write_text(dumps(settings) + "\n")
    noise = random.Random(5)
    for number in range(24):
        lr, width, augment = (
            10 ** noise.uniform(-3, -0.5),
            noise.randrange(16, 257),
            noise.choice(("none", "flip", "shift")),
        )
        value = (
            0.94
            - 0.05 * (math.log10(lr) + 1.6) ** 2
            + 0.01 * math.log2(width / 16) / 4
            + (augment == "shift") * 0.01
            + noise.gauss(0, 0.004)
        )
        spec = story.spec("digits")
        spec = dataclasses.replace(spec, parameters={"width": width, "augment": augment})
        status = "finished" if number < 17 else "unfinished"
        trial = write_run(
            path / "trials",
            f"{number:04d}",
            _variant(status, number % 4),
            status=status,
            spec=spec,
            lr=round(lr, 5),
            metrics={"valid/accuracy": value},
            age_s=3000 - number,
            usd_per_hour=0.44,
        )
        if 17 <= number < 22:
            ended = StudyTrial(number=number, state="pruned", parameters={}, reason="asha at 54,000 samples")
            (trial / TRIAL.name).write_text(dumps(ended) + "\n")


def devices_plan() -> Any:
    """A decision among devices that are not here, with prices."""
    decision = story.decision()

    def on(device: str, scale: float, dollars: float, memory: int) -> Candidate:
        forecast = story.forecast(scale * 80)
        cost = forecast.total_s.scaled(dollars / 3600, "USD")
        price = Price(
            device=device,
            provider="example",
            usd_per_hour=dollars,
            market="on demand",
            source="example",
            seen_on="2026-11-01",
        )
        return Candidate(
            device=device,
            plan=dataclasses.replace(story.PLAN, device=device),
            forecast=dataclasses.replace(forecast, cost_usd=cost),
            memory_bytes=memory * 2**30,
            is_here=False,
            price=price,
            why=f"{scale:.1f}× the time",
        )

    candidates = (
        on("b200", 0.2, 5.2, 179),
        on("h100", 0.36, 2.4, 80),
        on("a100", 0.74, 1.3, 80),
        on("l40s", 0.9, 0.9, 45),
        on("rtx-4090", 1.0, 0.44, 24),
        on("l4", 3.2, 0.48, 23),
        on("t4", 7.0, 0.35, 15),
    )
    return dataclasses.replace(
        decision,
        candidates=candidates,
        advice="An RTX 4090 costs least; a B200 is done five times sooner for three times the money.",
    )


def check(path: Path) -> None:
    """A data check with some findings."""
    path.mkdir()
    findings = (
        Finding(
            fault="duplicate",
            gravity="fault",
            id="cats/0012.jpg",
            related=("cats/0411.jpg",),
            detail="equal byte for byte",
        ),
        Finding(fault="corrupt", gravity="corrupt", id="dogs/0007.jpg", detail="ends after 2,048 of 18,210 bytes"),
        Finding(
            fault="leak", gravity="fault", id="valid/0003.jpg", related=("cats/0100.jpg",), detail="is in training too"
        ),
    )
    found = DataCheck(
        source="images",
        kind="images",
        made_at="2026-11-25T20:00:00+00:00",
        took_s=3.2,
        findings=findings,
        splits=(
            SplitFacts(name="train", num_samples=4000, classes={"cats": 2000, "dogs": 2000}),
            SplitFacts(name="valid", num_samples=400),
        ),
    )
    (path / "check.json").write_text(dumps(found) + "\n")


SCRIPT = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


def hostile(root: Path, secret: Path) -> int:  # noqa: C901, PLR0912 - a list of harms, one after the other
    """A hundred directories that mean harm; `secret` is a file outside that no answer may hold. How many were made."""
    root.mkdir(parents=True, exist_ok=True)
    whole = as_log(story.whole_run())
    made = 0

    def run(name: str, **options: Any) -> Path:
        nonlocal made
        made += 1
        return write_run(root, name, options.pop("events", whole), **options)

    for number in range(10):  # scripts in everything that is a text
        events = [
            *story.whole_run()[:2],
            Event(kind="warned", at=NOW_S, fields={"message": SCRIPT, "samples": 1}),
            Event(
                kind="logged",
                at=NOW_S,
                fields={
                    "samples": 5,
                    "scalars": {SCRIPT: [[1, 2.0]]},
                    "texts": [{"name": SCRIPT, "samples": 5, "text": SCRIPT}],
                    "images": [{"name": SCRIPT, "samples": 5, "file": "../../../secret.txt"}],
                },
            ),
            Event(kind="evaluated", at=NOW_S, fields={"split": SCRIPT, "samples": 9, "metrics": {SCRIPT: 0.5}}),
        ]
        path = run(
            f"script-{number}-<img src=x onerror=hacked=1>",
            events=events,
            failure=SCRIPT,
            status="failed",
            spec=dataclasses.replace(story.spec(SCRIPT, **{SCRIPT: SCRIPT}), entry=SCRIPT),
            tags=(SCRIPT,),
        )
        (path / "annotations.json").write_text(json.dumps({"tags": [SCRIPT] * 30, "note": SCRIPT}))
    for number, name in enumerate(
        (
            "events.jsonl",
            "run.json",
            "plan.json",
            "examples.json",
            "annotations.json",
            "launch.json",
            "lock",
            "spec.json",
        )
    ):
        path = run(f"link-{number}")
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(secret)
    for number in range(4):  # directories that are links, and links within
        made += 1
        (root / f"linked-{number}").symlink_to(secret.parent, target_is_directory=True)
    for number in range(4):
        path = run(f"ranks-link-{number}")
        (path / "ranks").symlink_to(secret.parent, target_is_directory=True)
        (path / "logged").symlink_to(secret.parent, target_is_directory=True)
    for number in range(6):  # giant records and labels
        path = run(f"giant-{number}", spec=story.spec("x" * 10_000_000) if number < 2 else None)
        if number >= 2:
            with (path / ("plan.json", "launch.json", "annotations.json", "run.json")[number - 2]).open("wb") as file:
                file.truncate(200 * 2**20)
    for number in range(6):  # torn and giant lines
        label = json.dumps(
            {"record": "Event", "schema": 1, "kind": "warned", "at": 1.0, "fields": {"message": "y" * 10_000_000}}
        ).encode()
        run(
            f"torn-{number}",
            events=(
                whole[: -100 - number],
                whole + label[:5_000_000],
                label + b"\n" + whole,
                b"\xff\xfe\0\n" * 999 + whole,
                b"[" * 100_000 + b"\n" + whole,
                b"\n" * 10_000,
            )[number],
        )
    for number in range(10):  # numbers that no run has
        fields = (
            {"samples": -1},
            {"samples": 2**70},
            {"samples": "1e400"},
            {"samples": True},
            {"samples": None},
            {"samples": 5, "loss": [1]},
            {"samples": 5, "split_s": {"data": "nan"}},
            {"samples": 5, "split_s": {f"p{i}": 1.0 for i in range(5000)}},
            {"samples": {"a": 1}},
            {"samples": 1e308, "wall_s": 1e308, "loss": 1e308},
        )[number]
        line = (
            json.dumps({"record": "Event", "schema": 1, "kind": "progress", "at": 1.0, "fields": fields}).encode()
            + b"\n"
        )
        run(f"numbers-{number}", events=whole + line)
    for number in range(8):  # records of other kinds and versions
        path = run(f"other-{number}")
        document = json.loads((path / "run.json").read_text())
        broken: Any = (
            {**document, "schema": 99},
            {**document, "record": "Plan"},
            [],
            "run",
            None,
            {**document, "new": 1},
            {**document, "name": 5},
            {},
        )[number]
        (path / "run.json").write_text(json.dumps(broken))
    for number in range(8):  # what is no plain file, and deep documents
        path = run(f"odd-{number}")
        name = ("events.jsonl", "run.json", "plan.json", "annotations.json")[number % 4]
        (path / name).unlink(missing_ok=True)
        if number < 4:
            os.mkfifo(path / name)
        elif number < 6:
            (path / name).mkdir()
        else:
            (path / name).write_text("[" * 50_000 + "]" * 50_000)
    for number in range(8):  # names and clocks
        events = [
            dataclasses.replace(
                event,
                at=(event.at * (1, -1, 1, 0.5)[number % 4]) if event.at * (1, -1, 1, 0.5)[number % 4] >= 0 else 0.0,
            )
            for event in story.whole_run()[: 40 + number]
        ]
        events = events if number % 2 else events[::-1]
        run(
            ("\u202eevil", "a\x1b[2Jb", "&lt;b&gt;", "%2e%2e%2f", "..%2f..", "'; drop table", "\u2028line", "~1~x")[
                number
            ],
            events=events,
        )
    for number in range(100 - made):
        sign(run(f"pid-{number}", status="unfinished"), (1, 2**31 - 1, os.getppid())[number % 3])
    return made
