"""The program of a Ray job whose run has several nodes: one actor on each, by a placement group, that starts its ranks.

What: this driver runs where Ray's jobs do. It asks for a bundle of resources on each of so many nodes, puts what was
sent and the order into the folder that all nodes see, and has each node's actor watch the ranks of its node
(`at_place.py`), which meet at the first actor's, with a secret made for this start. It repeats the run's log and state
as a run of one node does, and removes the copy of what was sent at the end. Where the driver is killed, Ray ends its
actors, and the ranks leave, too.
Use when: the nodes share a disk (`--place-option root=FOLDER`), as hosts by SSH do.
Costs: an idle actor a node, and the driver.
Does not do: replace a node that is gone; the run then fails after some starts in vain, and the same command goes on.
Source: Ray 2.60, ray.util.placement_group (STRICT_SPREAD: each bundle on a node of its own), and
PlacementGroupSchedulingStrategy.

`python -m stoker.launching.ray_nodes NODES RESOURCES PYTHON run ROOT [SECONDS SUBMITTED]`, in the folder that was sent:
RESOURCES is a JSON object of one node's; PYTHON starts the ranks, "" for the one of Ray's processes there.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker.errors import PlaceFailed, StokerError
from stoker.launching.at_place import STOPPED, ask_to_stop
from stoker.launching.launcher import seen_now
from stoker.launching.logged_run import placed_order, print_state, repeated

_LOOK_S = 1.0


class NodeActor:
    """On a node: says where it is, and watches the ranks of the node."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def about(self, seen: str) -> dict[str, Any]:
        """Address of the node, a free port, and whether the node sees a file."""
        ray = importlib.import_module("ray")
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return {
            "address": ray.util.get_node_ip_address(),
            "port": port,
            "node": ray.get_runtime_context().get_node_id(),
            "sees": Path(seen).exists(),
        }

    def start(self, directory: str, python: str, pythonpath: str, variables: Mapping[str, str], secret: str) -> None:
        """Start the program that watches this node's ranks; `python` "": this one."""
        environment = {**os.environ, **variables, "PYTHONPATH": pythonpath}
        program = [python or sys.executable, "-m", "stoker.launching.at_place", "run", directory, "--secrets"]
        # Ray kills this process with its driver, and its group, in which ranks would have no time to save.
        program += ["--parent", str(os.getpid())]
        self._process = subprocess.Popen(program, env=environment, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        with self._process.stdin as secrets_input:
            secrets_input.write(json.dumps({"STOKER_SECRET": secret}).encode())

    def wait(self, most_s: float) -> int | None:
        """The program's exit code; None while it runs, after so long [s]."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(most_s)
        return None


def run_on_nodes(
    sent: Path, root: Path, num_nodes: int, resources: Mapping[str, float], python: str, limit: Sequence[str]
) -> int:
    """Run the order in the folder `sent` on so many nodes; the exit code of the run.

    Raises:
        PlaceFailed: a node does not see the folder of runs; or as for a run of one node.
    """
    ray = importlib.import_module("ray")
    groups = importlib.import_module("ray.util.placement_group")
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    ray.init(address="auto", log_to_driver=False)
    with _shared_copy(sent, root) as shared:
        directory = placed_order(shared, root, *((float(limit[0]), limit[1]) if limit else ()))
        is_started = False
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
        try:
            each = ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
            print_state(seen_now("queued", f"waits for {num_nodes} nodes with {each} each"))
            group = groups.placement_group([dict(resources)] * num_nodes, strategy="STRICT_SPREAD")
            ray.get(group.ready())
            gpus, cpus = resources.get("GPU", 0), resources.get("CPU", 0)
            others = {name: amount for name, amount in resources.items() if name not in {"CPU", "GPU"}}
            make = ray.remote(NodeActor)
            actors = [
                make.options(
                    num_cpus=cpus,
                    num_gpus=gpus,
                    resources=others,
                    max_concurrency=2,
                    scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                        group, placement_group_bundle_index=index
                    ),
                ).remote()
                for index in range(num_nodes)
            ]
            nodes = _nodes_of(ray, actors, directory, root)
            # Each node looks for the mark that this leaves.
            signal.signal(signal.SIGTERM, lambda *_: ask_to_stop(directory))
            pythonpath = json.loads((directory / "launch" / "order.json").read_bytes())["pythonpath"]
            master, port = str(nodes[0]["address"]), str(nodes[0]["port"])
            meeting = {"STOKER_HOSTS": str(num_nodes), "STOKER_MASTER": master, "STOKER_PORT": port}
            about, secret = (str(directory), python, pythonpath), secrets.token_hex(32)
            with repeated(directory):
                is_started = True
                ray.get(
                    [
                        actor.start.remote(*about, {**meeting, "STOKER_HOST": str(host)}, secret)
                        for host, actor in enumerate(actors)
                    ]
                )
                return _wait(ray, actors)
        finally:
            if not is_started:
                _forget_order(directory)


@contextmanager
def _shared_copy(sent: Path, root: Path) -> Iterator[Path]:
    """A copy of what was sent in the folder that all nodes see; each has it, but not in one place.

    It is removed at the end of the block; not where that fails, since ranks may be left that read from it: the next
    start of the run takes it as it is.

    Raises:
        PlaceFailed: it cannot be written.
    """
    shared = root.expanduser().absolute() / "sent" / sent.name
    aside = shared.with_name(f".writing-{shared.name}-{secrets.token_hex(4)}")
    if not shared.exists():
        try:
            shutil.copytree(sent, aside, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            aside.rename(shared)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            if not shared.exists():  # else another driver of the run was faster
                raise PlaceFailed(
                    f"what was sent cannot be written to {shared}: {error}",
                    remedy="Give a folder that all nodes see: --place-option root=/shared/stoker.",
                ) from error
    try:
        yield shared
    except (StokerError, SystemExit):  # before a rank was started
        _remove(shared)
        raise
    _remove(shared)


def _remove(shared: Path) -> None:
    """Remove a copy, and what drivers that were killed have left of theirs."""
    for path in (shared, *shared.parent.glob(f".writing-{shared.name}-*")):
        shutil.rmtree(path, ignore_errors=True)


def _nodes_of(ray: Any, actors: Sequence[Any], directory: Path, root: Path) -> list[dict[str, Any]]:
    """The actors' answers to `about`.

    Raises:
        PlaceFailed: a node does not see the run's directory; it may have an older one of that name on its own disk.
    """
    mark = directory / "launch" / f".seen-{secrets.token_hex(8)}"
    mark.touch()
    try:
        nodes: list[dict[str, Any]] = ray.get([actor.about.remote(str(mark)) for actor in actors])
    finally:
        mark.unlink()
    if blind := sorted({str(node["address"]) for node in nodes if not node["sees"]}):
        raise PlaceFailed(
            f"{', '.join(blind)} does not see {root}, and the nodes of a run share its directory",
            remedy="Give a folder that all nodes see: --place-option root=/shared/stoker.",
        )
    return nodes


def _forget_order(directory: Path) -> None:
    """Remove the order of a run that was never started: it would keep the name for its owner."""
    if (directory / "run.json").exists():
        return
    (directory / "launch" / "order.json").unlink(missing_ok=True)
    with suppress(OSError):  # not empty
        (directory / "launch").rmdir()
        directory.rmdir()


def _wait(ray: Any, actors: Sequence[Any]) -> int:
    """The exit code of the run: that of host 0, or the one of a host that failed."""
    codes: dict[int, int] = {}
    while len(codes) < len(actors):
        waiting = [host for host in range(len(actors)) if host not in codes]
        for host, answer in [(host, actors[host].wait.remote(_LOOK_S)) for host in waiting]:
            try:
                if (code := ray.get(answer)) is not None:
                    codes[host] = code
            except ray.exceptions.RayError as error:
                sys.stderr.write(f"node {host} is gone: {error}\n")
                codes[host] = PlaceFailed.exit_code
    failed = [code for code in codes.values() if code]
    return codes[0] or (failed[0] if failed else 0)


def main(arguments: Sequence[str]) -> int:
    """The command line of the driver."""
    num_nodes, resources, python, _, root, *limit = arguments
    try:
        return run_on_nodes(Path.cwd(), Path(root), int(num_nodes), json.loads(resources), python, limit)
    except StokerError as error:
        sys.stderr.write(f"{error}\n")
        # A driver that said "queued" last was killed.
        print_state(seen_now("failed", error.message, error.remedy or "", exit_code=error.exit_code))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
