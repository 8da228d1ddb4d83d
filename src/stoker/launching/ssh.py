"""Hosts by SSH: `ssh:me@box`, `ssh:box1,box2/2xcpu`, `ssh:me@box:2222/4xa100`.

What: one process on each host watches that host's ranks (`at_place.py`), in a session of its own that outlives the
line; there is no daemon to install and no port to open on one host.
Use when: machines that can be logged into, with a GNU userland. Costs: nothing between commands.
Several hosts see one folder for runs (NFS or its like, `--place-option root=/shared/stoker`), and reach each other:
they meet on a port of host 0, and exchange gradients on ports that their systems choose.
Does not do: queueing. Who comes first runs; the probe shows the load.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from stoker.devices import catalogue
from stoker.errors import BadSetting, NoDevice, PlaceFailed, PlaceUnreachable, StokerError
from stoker.launching import reachable_ports
from stoker.launching.at_place import LaunchOrder
from stoker.launching.bundle import secret_values
from stoker.launching.environment_lock import EnvironmentLock
from stoker.launching.launcher import (
    ROOT,
    Handle,
    Launcher,
    LaunchTarget,
    Offer,
    Probe,
    Request,
    Submission,
    is_model,
    seen_now,
    train_command,
    utc_now,
)
from stoker.launching.lines import HOST_SCRIPT, Line, line_to
from stoker.launching.shipment import Found, Shipped, look, order_file, program_at, record_there, secrets_input, ship
from stoker.records.codec import from_json, loads
from stoker.records.launch import ENDED, LaunchState
from stoker.units import format_bytes, format_seconds

R = TypeVar("R")

_MOST_CLOCK_S = 600.0
_LEAST_FREE_BYTES = 1 << 30
_HANDLE = "handle.json"

_PROBE = (
    HOST_SCRIPT
    + r"""
echo "cores $(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)"
echo "load $(cut -d' ' -f1-3 /proc/loadavg)"
echo "memory $(awk '/MemAvailable/ {print $2}' /proc/meminfo)"
cd && f=$1; while [ ! -d "$f" ]; do f=$(dirname -- "$f"); done
echo "disk $(df -Pk -- "$f" | awk 'END {print $4}')"
[ -w "$f" ] || echo "readonly $f"
echo "address ${SSH_CONNECTION:-}"
command -v nvidia-smi >/dev/null 2>&1 &&
    nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version --format=csv,noheader,nounits 2>/dev/null |
    sed -n '/,.*,/s/^/gpu /p'  # a sentence about a driver that fails is no GPU
exit 0
"""
)

_WITH_PYTHON = """
python=$1; shift
for p in "$python" python3.11 python3.12 python3.13 python3.14 python3; do
    [ -z "$p" ] || ! command -v "$p" > /dev/null 2>&1 || exec "$p" -c "$@"
done
echo "no Python" >&2; exit 1
"""
_PORTS = Path(reachable_ports.__file__).read_text()
_LISTEN_S = 120.0
"""How long hosts listen for the others at most [s]: a login to a busy host takes tens of seconds, and is waited for
twice; what still listens when the answers are known is ended."""


class SshLauncher(Launcher):
    """Hosts that the user can log into."""

    kind = "ssh"
    syntax = "ssh:[user@]host[:port][,host2…][/[N×]cpu|here|DEVICE]"
    options = ("root", "data", "clock", "python", "port")

    def parse(self, text: str) -> LaunchTarget:
        """The hosts, and the devices to use on each."""
        address, slash, shape = text.strip().partition("/")
        hosts = [host.strip() for host in address.split(",")]
        if not all(hosts):
            raise self.unreadable(text, "ssh:me@box/2xcpu")
        each, device = 1, ""
        if slash:
            one_node = f"Name each host: ssh:{hosts[0]},…/{shape.partition('x')[2]}."
            _, each, device = self.shape_in(text, shape, one_node=one_node)
        if len(set(hosts)) < len(hosts):
            raise NoDevice(
                f"--on ssh:{text} names a host twice.", remedy=f"One host with two devices is {hosts[0]}/2xcpu."
            )
        try:
            for host in hosts:
                line_to(host)
        except PlaceFailed as error:
            raise self.unreadable(text, why=f": {error.message}") from error
        return self.target(text, ",".join(hosts), (len(hosts), each, device))

    def probe(self, target: LaunchTarget, options: Mapping[str, str]) -> Probe:
        """The resources of each host; all are asked at once."""
        root = options.get("root", ROOT)
        lines = _lines(target.address)
        answers = _on_each(lines, lambda line: _ask(line, root))
        facts: dict[str, str] = {}
        missing: list[str] = []
        for line, (about, clock_s) in zip(lines, answers, strict=True):
            host = f"{line.name}: " if len(lines) > 1 else ""
            facts |= {f"{host}{name}": text for name, text in _facts(about, clock_s).items()}
            missing += _missing(line.name, about, clock_s, target, options)
        if len(lines) > 1 and not missing:
            missing += _unshared(lines, root)
            cut, taken = _unreachable(lines, answers[0][0], options)
            missing += cut
            if not cut:
                facts["ports"] = "each host reaches each other one"
            if taken:
                facts["port"] = f"{options['port']} of {lines[0].name} is in use ({taken})"
        gpus = answers[0][0].get("gpu", [])
        device = gpus[0].split(",")[0].strip() if gpus else answers[0][0].get("cpu", [""])[0]
        return Probe(
            facts=facts,
            missing=tuple(missing),
            device=device,
            cores=int(answers[0][0].get("cores", ["0"])[0]),
            loop_s=max(float(about.get("loop", ["0"])[0]) for about, _ in answers),
        )

    def offers(self, request: Request) -> tuple[Offer, ...]:
        """The hosts as they are: there is no queue, and no price that Stoker knows."""
        source, why = "a host of one's own: no price is known", "hosts by SSH have no queue"
        return (Offer.of(request.target, starts_in_s=0.0, price_source=source, why=why),)

    def script(self, submission: Submission) -> str:
        """The commands of `start`, in order."""
        root, hosts = submission.root, submission.target.address.split(",")
        shipped, environment = Shipped.of(submission, root), submission.environment
        lines = [f"# on {hosts[0]}, below {root} (relative to the home directory unless absolute)"]
        lines += [
            f"# {bundle.folder}: {bundle.name}, {len(bundle.files)} file{'s' if len(bundle.files) > 1 else ''}, "
            f"{format_bytes(bundle.num_bytes)}; sent if it is not there"
            for bundle in submission.bundles
        ]
        if isinstance(environment, EnvironmentLock):
            lines.append(f"# {environment.folder(environment.python)}: pip install, once, of")
            lines += [f"#   {requirement}" for requirement in environment.requirements]
        names = [*submission.secrets, "STOKER_SECRET"]
        lines.append(f"# secrets, on standard input: {', '.join(names)}")
        lines += [shlex.join(["ssh", host, *shipped.program("start", "--secrets")]) for host in hosts]
        train = train_command(submission, "--run-dir", shipped.directory, "--json")
        lines.append(f"# which starts in {shipped.code}:\n#     {train}")
        return "\n".join(lines) + "\n"

    def start(self, submission: Submission, tell: Callable[[str], None]) -> Handle:
        """Send, make the environment, and start one watching process on each host."""
        lines = _lines(submission.target.address)
        found = look(lines[0], submission)
        if (going := self._going_on(lines[0], submission, found)) is not None:
            return going
        if len(lines) > 1 and (port := _port(submission.options)):
            _require_free(lines[0], port, submission.options.get("python", ""))
        shipped = ship(lines[0], submission, found, tell=tell)
        handle: Handle = {
            "hosts": submission.target.address.split(","),
            "directory": shipped.directory,
            "python": shipped.python,
            "stoker": shipped.stoker,
            "sent_bytes": shipped.sent_bytes,
        }
        order = order_file(submission, shipped, is_requeued=False, submitted_at=utc_now("milliseconds"))
        folder = f"{shipped.directory}/launch"
        files = {f"{folder}/order.json": (order, 0o644), f"{folder}/{_HANDLE}": (json.dumps(handle).encode(), 0o644)}
        lines[0].write_all(files, without=f"{folder}/stop")
        values = secret_values(submission.secrets) | {"STOKER_SECRET": secrets.token_hex(32)}
        variables = self._meeting(lines, shipped, _port(submission.options))
        started: list[Line] = []
        try:
            for host, line in enumerate(lines):
                program = ["env", f"STOKER_HOST={host}", *variables, *shipped.program("start", "--secrets")[1:]]
                _answer(line, program, stdin=secrets_input(values))
                started.append(line)
        except StokerError:
            for line in started:
                with suppress(PlaceFailed):  # the first error is the one to report
                    line.run(shipped.program("stop"), check=False)
            raise
        return handle

    def _going_on(self, line: Line, submission: Submission, found: Found) -> Handle | None:
        """The handle of this very run if it is going on: it was started, and the answer never reached home."""
        folder, text = f"{found.root}/runs/{submission.run}/launch", found.records.get(f"launch/{_HANDLE}", b"")
        if not text:
            return None
        order = found.order
        owner = record_there(line, f"{folder}/order.json", lambda: loads(order, LaunchOrder).owner)
        if owner != submission.owner:
            return None
        handle: Handle = record_there(line, f"{folder}/{_HANDLE}", lambda: json.loads(text))
        return None if self.state(handle).phase in ENDED else {**handle, "sent_bytes": 0}

    def state(self, handle: Handle) -> LaunchState:
        """The state by the hosts; one that does not answer counts only if another one misses it as well."""

        def ask(line: Line) -> LaunchState | PlaceUnreachable:
            try:
                text = _answer(line, _program(handle, "state"), timeout_s=20.0)
                return from_json(json.loads(text), LaunchState)
            except PlaceUnreachable as error:
                return error
            except ValueError as error:
                return PlaceUnreachable(f"{line.name} gave an answer that cannot be read: {error}")

        answers = _on_each(_lines(",".join(handle["hosts"])), ask)
        states = [answer for answer in answers if isinstance(answer, LaunchState)]
        silent = [answer for answer in answers if isinstance(answer, PlaceUnreachable)]
        ended = next((state for state in states if state.phase in ENDED), None)
        if ended is not None:
            return ended
        if silent:
            return seen_now("unknown", "a host does not answer", silent[0].message)
        return states[0]

    def events(self, handle: Handle, offset: int) -> bytes:
        """The run's log on host 0, from `offset` on."""
        return _first_line(handle).read(f"{handle['directory']}/events.jsonl", offset)

    def stop(self, handle: Handle) -> None:
        """Ask the watching process of each host."""
        _on_each(_lines(",".join(handle["hosts"])), lambda line: _answer(line, _program(handle, "stop")))

    def fetch(self, handle: Handle, into: Path) -> None:
        """The run's directory on host 0, but for locks and what says where it was started there."""
        _first_line(handle).fetch_tree(handle["directory"], into)

    def _meeting(self, lines: Sequence[Line], shipped: Shipped, port: int) -> list[str]:
        """Variables by which the hosts find each other; `port` 0: a free one."""
        variables = [f"STOKER_HOSTS={len(lines)}"]
        if len(lines) == 1:
            return variables
        if not port:
            script = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1])"
            port = int(lines[0].run([shipped.python, "-c", script]).text)
        address = lines[0].shell('set -- $SSH_CONNECTION; printf %s "$3"').text
        return [*variables, f"STOKER_MASTER={address or '127.0.0.1'}", f"STOKER_PORT={port}"]


def _ask(line: Line, root: str) -> tuple[dict[str, list[str]], float]:
    """Facts of a host by name, and by how much its clock is ahead [s]."""
    before = time.time()
    text = line.shell(_PROBE, root).text
    after = time.time()
    about: dict[str, list[str]] = {}
    for row in text.splitlines():
        word, _, rest = row.partition(" ")
        about.setdefault(word, []).append(rest.strip())
    there = float(about.get("time", ["nan"])[0])
    # Within the question's time the clocks may differ by all of it.
    clock_s = there - after if there > after else min(0.0, there - before)
    return about, clock_s


def _facts(about: Mapping[str, list[str]], clock_s: float) -> dict[str, str]:
    def first(word: str, default: str = "unknown") -> str:
        return about.get(word, [default])[0] or default

    gpus = [[field.strip() for field in gpu.split(",")] for gpu in about.get("gpu", [])]
    # Where a GPU shares the memory of the host, nvidia-smi has "[N/A]".
    devices = (
        ", ".join(f"{name} ({int(mib) / 1024:.0f} GiB)" if mib.isdecimal() else name for name, mib, *_ in gpus)
        or "no GPU"
    )
    return {
        "Python": ", ".join(sorted(set(filter(None, about.get("python", []))))) or "none",  # "": a name that fails
        "devices": f"{devices}; {first('cores')} cores, {first('cpu')}",
        **({"driver": gpus[0][3]} if gpus and len(gpus[0]) > 3 else {}),
        "load": first("load"),
        "memory": f"{format_bytes(int(first('memory', '0')) * 1024)} available",
        "disk": f"{format_bytes(int(first('disk', '0')) * 1024)} free",
        "clock": "as here"
        if abs(clock_s) < 1
        else f"{format_seconds(abs(clock_s))} {'ahead' if clock_s > 0 else 'behind'}",
    }


def _missing(
    host: str, about: Mapping[str, list[str]], clock_s: float, target: LaunchTarget, options: Mapping[str, str]
) -> list[str]:
    """Sentences on what a host lacks for the run, with the remedy."""
    missing = []
    versions = [tuple(map(int, re.findall(r"\d+", text)[:2])) for text in about.get("python", [])]
    if not any(version >= (3, 11) for version in versions) and "python" not in options:
        missing.append(
            f"{host} has no Python of at least 3.11: install one there, or name it with --env /path/to/python"
        )
    if target.device not in {"", "cpu"}:
        gpus = [gpu.split(",")[0].strip() for gpu in about.get("gpu", [])]
        if sum(_is_called(gpu, target.device) for gpu in gpus) < target.devices_each:
            has = ", ".join(f"{count} × {gpu}" for gpu, count in Counter(gpus).items()) or "no GPU"
            missing.append(f"{host} has {has}; asked for: {target.devices_each} × {target.device}")
    free = int(about.get("disk", ["0"])[0] or 0) * 1024
    if free < _LEAST_FREE_BYTES and "root" not in options:
        missing.append(f"{host} has {format_bytes(free)} of disk free: free some, or give --place-option root=FOLDER")
    if "readonly" in about:
        missing.append(f"{host}: {about['readonly'][0]} cannot be written: give --place-option root=FOLDER")
    if abs(clock_s) > _MOST_CLOCK_S and options.get("clock") != "any":
        way = "ahead" if clock_s > 0 else "behind"
        missing.append(
            f"the clock of {host} is {format_seconds(abs(clock_s))} {way}: set it (timedatectl set-ntp true), or "
            "accept wrong times in the log with --place-option clock=any"
        )
    return missing


def _is_called(gpu: str, device: str) -> bool:
    """Whether a driver's name of a GPU means the device of a word; `gpu` and `cuda` are any."""
    return device in {"gpu", "cuda"} or is_model(gpu, device) or catalogue().called(gpu) in catalogue().find(device)


def _unshared(lines: Sequence[Line], root: str) -> list[str]:
    """Hosts that do not see the first one's folder of runs."""
    token = f"{lines[0].absolute(root)}/runs/.seen-{secrets.token_hex(8)}"
    lines[0].write(token, b"")
    try:
        return [
            f"{line.name} does not see {root} of {lines[0].name}: name a shared disk, --place-option root=FOLDER"
            for line, is_seen in zip(lines[1:], _on_each(lines[1:], lambda line: line.exists(token)), strict=True)
            if not is_seen
        ]
    finally:
        lines[0].run(["rm", "-f", "--", token])


def _require_free(line: Line, port: int, python: str) -> None:
    """Refuse a port in which ranks cannot meet; the probe does not, since it may be this very run's, which goes on.

    Raises:
        PlaceFailed: it is in use, or may not be used.
    """
    answer = line.shell(_WITH_PYTHON, python, _PORTS, "listen", "127.0.0.1", str(port), "0", "0", "-")
    word, _, why = answer.text.partition("\n")[0].partition(" ")
    if word == "taken":
        raise PlaceFailed(
            f"port {port} of {line.name} cannot be used ({why})", remedy="Give another one: --place-option port=N."
        )


def _unreachable(
    lines: Sequence[Line], first: Mapping[str, list[str]], options: Mapping[str, str]
) -> tuple[list[str], str]:
    """Sentences on hosts that cannot reach each other, and why the port of the meeting is not free; "" if it is.

    `first`: the first host's answer to the probe.
    """
    master = (first.get("address", [""])[0].split() or ["", "", "127.0.0.1"])[2]
    port, token, python = _port(options), secrets.token_hex(8), options.get("python", "")

    def check(line: Line, *arguments: str) -> list[str]:
        answer = line.shell(_WITH_PYTHON, python, _PORTS, *arguments, check=False)
        if answer.code != 0:
            raise PlaceFailed(f"{line.name} cannot try its ports: {answer.last_line()}")
        return answer.text.splitlines()

    def listening(index: int, own_port: int = 0) -> dict[str, str]:
        arguments = (str(own_port), str(len(lines) - 1), f"{_LISTEN_S:g}", token)
        host = dict(row.partition(" ")[::2] for row in check(lines[index], "listen", master, *arguments))
        if "taken" in host:
            if not own_port:
                raise PlaceFailed(f"{lines[index].name} cannot try its ports: {host['taken']}")
            return host | listening(index)
        listeners[lines[index].name] = host["process"]
        return host

    def end(line: Line) -> None:
        if process := listeners.get(line.name):
            with suppress(PlaceFailed):  # it ends by itself in a while
                line.run(["kill", process], check=False)

    listeners: dict[str, str] = {}
    with ExitStack() as ending, ThreadPoolExecutor(len(lines)) as pool:
        ending.callback(_on_each, lines, end)  # a listener goes once all others have come, and holds its port till then
        there = list(pool.map(listening, range(len(lines)), [port, *[0] * (len(lines) - 1)]))
        places = [f"{master if index == 0 else host['address']}:{host['port']}" for index, host in enumerate(there)]
        others = [[other for other in range(len(lines)) if other != index] for index in range(len(lines))]
        tried = pool.map(
            lambda index: check(lines[index], "reach", token, *(places[other] for other in others[index])),
            range(len(lines)),
        )
        missing = []
        for index, answers in enumerate(tried):
            for other, answer in zip(others[index], answers, strict=True):
                if answer != "ok":
                    address, _, number = places[other].rpartition(":")
                    ports = "-".join(there[other]["range"].split())
                    meeting = f" and {port}, where the ranks meet," if other == 0 and port else ""
                    target, source = lines[other].name, lines[index].name
                    missing.append(
                        f"{source} cannot reach {target} at {address} on TCP port {number} ({answer}): open ports "
                        f"{ports}{meeting} of {target} to {source}, or name the hosts by addresses of a network in "
                        "which they reach each other"
                    )
        if not missing:
            ending.pop_all()
        return missing, there[0].get("taken", "")


def _port(options: Mapping[str, str]) -> int:
    """The port of the first host in which ranks meet; 0: a free one.

    Raises:
        BadSetting: it is no number of a port.
    """
    text = options.get("port", "0")
    if not text.isdecimal() or not (int(text) == 0 or 1024 <= int(text) < 65536):
        raise BadSetting(f"--place-option port={text} is no port", remedy="Give a number from 1024 to 65535.")
    return int(text)


def _lines(address: str) -> list[Line]:
    return [line_to(host) for host in address.split(",")]


def _first_line(handle: Handle) -> Line:
    return line_to(handle["hosts"][0])


def _program(handle: Handle, command: str) -> list[str]:
    return program_at(handle["python"], handle["stoker"], command, handle["directory"])


def _answer(line: Line, program: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> bytes:
    """The answer of `at_place` on a host.

    Raises:
        PlaceFailed: it failed, with its own sentence.
    """
    answer = line.run(program, stdin=stdin, timeout_s=timeout_s, check=False)
    if answer.code != 0:
        raise PlaceFailed(
            f"{line.name}: {answer.last_line()}",
            remedy="If the run's directory there is gone, start another run with --new.",
        )
    return answer.stdout


def _on_each(lines: Sequence[Line], action: Callable[[Line], R]) -> list[R]:
    """The action's results over all hosts at once, in their order."""
    if len(lines) <= 1:
        return [action(line) for line in lines]
    with ThreadPoolExecutor(len(lines)) as pool:
        return list(pool.map(action, lines))


LAUNCHER = SshLauncher()
