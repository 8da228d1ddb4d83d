"""Counts in the place of training: what is sent as `stoker/__main__.py` and `stoker/verifying/replay.py` in tests.

The state is a chain of digests, one link an update, saved as checkpoints of Stoker's; a block can be replayed, resumed,
and faked (`STOKER_CHEAT` makes other links, `STOKER_LIE` other messages). A site of a gang exchanges its state with the
others after every `EVERY` updates. Neither PyTorch nor a CPU that is at leisure is needed.
"""

import hashlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from stoker.records import Candidate, CheckpointManifest, Decision, Estimate, Forecast, Plan, Position
from stoker.records.codec import dumps, to_json
from stoker.store import CheckpointStore, checkpoint_name
from stoker.store.site_message import MessageHead, decode_message, encode_message, message_name

SPEC = "5" * 64
EVERY = 50


def link(state, update, cheat=""):
    """The state after update number `update`."""
    return hashlib.sha256(state + update.to_bytes(8, "little") + cheat.encode()).digest()


def cheat_at(update):
    """What a cheat adds to the link after `update` updates, about every tenth."""
    return os.environ.get("STOKER_CHEAT", "") if update % 10 == 7 else ""


def met_sites(words, state, updates):
    """The state after an exchange with the other sites, if one is due."""
    if "--site" not in words or updates % EVERY:
        return state
    site, sites = map(int, words[words.index("--site") + 1].split("/"))
    folder = Path(words[words.index("--exchange") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    sent = hashlib.sha256(state).digest() if os.environ.get("STOKER_LIE") else state
    head = MessageHead(
        job=SPEC,
        sites=sites,
        site=site,
        update=updates - 1,
        fragment=0,
        num_bytes=len(sent),
        sha256=hashlib.sha256(sent).hexdigest(),
    )
    (folder / "aside").write_bytes(encode_message(head, sent))
    (folder / "aside").replace(folder / head.name)
    end, states = time.monotonic() + 60, []
    for other in range(sites):
        while other != site:
            try:
                states.append(decode_message((folder / message_name(updates - 1, 0, other)).read_bytes())[1])
                break
            except (FileNotFoundError, ValueError):
                if time.monotonic() > end:
                    sys.exit(f"no message of site {other} after update {updates}")
                time.sleep(0.01)
        else:
            states.append(state)
    return hashlib.sha256(b"".join(states)).digest()


def plan(total):
    """The record of a plan for a job of `total` updates, as JSON."""
    none = Estimate(value=0.0, low=0.0, high=0.0, unit="s", basis="unknown")
    forecast = Forecast(
        step_s=none,
        samples_per_s=none,
        evaluate_s=none,
        checkpoint_s=none,
        total_s=none,
        peak_bytes=none,
        total_samples=total,
        total_updates=total,
    )
    chosen = Candidate(device="cpu", plan=Plan(device="cpu", micro_batch=1), forecast=forecast, memory_bytes=1)
    return dumps(Decision(device="cpu", candidates=(chosen,), rejected=(), explanation=(), took_s=0.0))


def save(store, state, updates, verdict=None):
    """Write a checkpoint; its manifest. `verdict`: why the run ends early."""
    course = {"is": "dict", "of": [["judged", updates], ["verdict", verdict]]}
    skeleton = {"progress": {"is": "dict", "of": [["course", course]]}}

    def files(folder):
        save_file({"w": np.frombuffer(state, np.uint8).copy()}, folder / "model.safetensors")

    path = store.write(
        checkpoint_name(Position(samples=updates, updates=updates)),
        files,
        lambda digests: CheckpointManifest(
            spec_digest=SPEC,
            position=Position(samples=updates, updates=updates),
            stoker_version="",
            torch_version="",
            files=digests,
            skeleton=skeleton,
        ),
    )
    return store.named(path.name)[1]


def begun(run):
    """The state and the number of updates that a run's directory has."""
    store = CheckpointStore(run / "checkpoints")
    found = store.newest()
    if found is None:
        return store, b"\0" * 32, 0
    return store, load_file(found[0] / "model.safetensors")["w"].tobytes(), found[1].position.updates


def train(words):
    """Count to the end, a checkpoint now and then, as `stoker train` would."""
    if os.environ.get("RANK", "0") != "0":
        return follow()
    run = Path(words[words.index("--run-dir") + 1])
    others = met()
    every_s = float(words[words.index("--checkpoint-every") + 1])
    settings = dict(word.split("=") for option, word in itertools.pairwise(words) if option == "--set")
    total, pace_s = int(settings["updates"]), float(settings.get("pace", "0.001"))
    if "fail" in settings:
        print(f"error: {settings['fail']}", file=sys.stderr)
        return 2
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    store, state, updates = begun(run)
    (run / "run.json").write_text("{}")
    (run / "plan.json").write_text(plan(total))
    (run / "link").unlink(missing_ok=True)
    (run / "link").symlink_to("/etc/hostname")
    saved = time.monotonic()
    with (run / "events.jsonl").open("a") as log:

        def tell(kind):
            log.write(
                json.dumps(
                    {
                        "record": "Event",
                        "schema": 1,
                        "kind": kind,
                        "at": time.time(),
                        "fields": {"samples": updates, "run": run.name},
                    }
                )
                + "\n"
            )
            log.flush()

        tell("started" if not updates else "resumed")
        while updates < total and not stopped:
            state, updates = (
                link(state, updates, cheat_at(updates)),
                updates + 1,
            )
            state = met_sites(words, state, updates)
            time.sleep(pace_s)
            if time.monotonic() - saved > every_s:
                save(store, state, updates)
                tell("checkpointed")
                saved = time.monotonic()
        save(store, state, updates)
        if stopped:
            tell("stopped")
            return ended(130, others)
        (run / "model.safetensors").write_bytes(state)
        tell("finished")
    return ended(0, others)


def ended(code, others):
    """Let the other ranks end; the exit code."""
    for other in others:
        other.close()
    return code


def met():
    """The other ranks, which come over the loopback."""
    others = []
    if (size := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as server:
            server.settimeout(60)
            others = [server.accept()[0] for _ in range(size - 1)]
    return others


def follow():
    """A rank that waits for the end of the first one."""
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as first:
                while first.recv(1):
                    pass
            return 130 if stopped else 0
        except ConnectionRefusedError:
            time.sleep(0.05)
    return 4


def replay(words):
    """Make links again, as `stoker.verifying.replay` would."""
    run, until = Path(words[0]), int(words[words.index("--until") + 1])
    store, state, updates = begun(run)
    at = {int(word) for word in words[words.index("--at") + 1].split(",")} if "--at" in words else set()
    states = []
    while updates < until:
        state, updates = link(state, updates, cheat_at(updates)), updates + 1
        state = met_sites(words, state, updates)
        if updates == until or updates in at:
            manifest = save(store, state, updates)
            states.append(manifest.state_digest())
    print(json.dumps({"manifest": to_json(manifest), "states": states}))
    return 0


if __name__ == "__main__":
    sys.exit(replay(sys.argv[1:]) if Path(sys.argv[0]).name.startswith("replay") else train(sys.argv[2:]))
