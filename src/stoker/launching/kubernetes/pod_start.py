"""Runs in a training container: its text is sent in a ConfigMap. Standard library of Python 3.9 and later.

Unpacks what was sent into folders named by digest on the run's volume, waits until an earlier pod of the run has saved
and left, starts the program that starts this host's ranks, and leaves its last state as the container's termination
message, so that a pod's status says why it ended.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

NOT_SENT, STILL_HELD, NO_PACKAGES, NOT_OURS, CANNOT_WRITE = 66, 69, 72, 73, 74
"""Exit codes: a folder is neither on the volume nor in the ConfigMaps; an earlier pod holds the run for too long; the
image's Python lacks what Stoker needs; the volume has a run of that name from elsewhere; the volume is full, or may not
be written."""

LEFT = 130
"""Exit code of a pod that was ended before the run in it began: another one follows, as after a save."""

WHOLE = ".stoker-whole"
"""Last entry of a tar file: without it the file was cut."""

_REMEDIES = {
    errno.ENOSPC: "; make its claim larger, or delete it and give --place-option size=AMOUNT",
    errno.EACCES: "; give --place-option user=UID, the user to whom it belongs",
}
"""What to do about a volume, by the number of the error."""

_MOST_MESSAGE = 4000
"""Kubernetes keeps 4,096 bytes of a termination message."""


class CannotStart(Exception):
    """An error that is printed before the container ends with `code`."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def run(sent: Path, environ: dict[str, str]) -> int:
    """Do what `start.json` in the folder `sent` says; the exit code of its command.

    Raises:
        CannotStart: what is missing.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(LEFT))  # the first process of a container ignores it otherwise
    orders = json.loads((sent / "start.json").read_text(encoding="utf-8"))
    root = Path(orders["root"])
    for folder, parts in orders["folders"].items():
        unpack(root / folder, [sent / part for part in parts])
    if missing := [path for path in orders["expected"] if not Path(path).exists()]:
        raise CannotStart(NOT_SENT, f"the image and the volume have no {missing[0]}, which the job reads")
    host = environ.get("JOB_COMPLETION_INDEX") or "0"
    launch = root / orders["run"] / "launch"
    try:
        hold(launch / f"pod-{host}.lock", orders["patience_s"])
        place_order(launch, orders["order"], host)
    except OSError as error:
        raise cannot_write(launch, error) from error
    environ["PYTHONPATH"] = str(root / orders["stoker"])
    python = orders["python"]
    if orders["lock"]:
        made = subprocess.run(
            [python, "-m", "stoker.launching.environment_lock", str(root)],
            input=orders["lock"],
            stdout=subprocess.PIPE,
            env=environ,
            check=False,
            text=True,
        )
        if made.returncode != 0:
            return made.returncode
        python = made.stdout.strip().splitlines()[-1]
    else:
        require_packages(python, orders["check"])
    command = [python, "-m", "stoker.launching.at_place", "run", str(root / orders["run"])]
    process = subprocess.Popen(command, cwd=root, env=environ)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
    teller = None
    if host == "0" and environ.get("KUBEFLOW_TRAINER_STATUS_URL"):
        teller = subprocess.Popen(
            [python, "-m", "stoker.launching.platform_progress", str(root / orders["run"])], cwd=root, env=environ
        )
    code = process.wait()
    if teller is not None:
        teller.terminate()
    say_why(launch / f"host-{host}.json", Path(orders["message"]))
    return code if code >= 0 else 128 - code


def cannot_write(path: Path, error: OSError) -> CannotStart:
    """That `path` on the volume cannot be written, and what to do."""
    remedy = _REMEDIES.get(error.errno or 0, "")
    return CannotStart(CANNOT_WRITE, f"{path} cannot be written on the volume: {error}{remedy}")


def require_packages(python: str, check: str) -> None:
    """Refuse a Python of the image that lacks what a run needs, by the program `check`.

    Raises:
        CannotStart: it does, or is not there.
    """
    remedy = "--env lock makes an environment where pip reaches an index; or name another --image"
    try:
        checked = subprocess.run([python, "-c", check], stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise CannotStart(NO_PACKAGES, f"the image has no {python} ({error.strerror}): {remedy}") from error
    if checked.returncode != 0:
        why = (checked.stderr.strip().splitlines() or ["its Python is older than 3.11"])[-1]
        raise CannotStart(NO_PACKAGES, f"in the image, {why}: {remedy}")


def unpack(folder: Path, parts: list[Path]) -> None:
    """Make a folder on the volume from the parts of a tar file, whole or not at all, unless it is there.

    Raises:
        CannotStart: it is not there, and was not sent.
    """
    if folder.is_dir():
        return
    if not parts:
        raise CannotStart(NOT_SENT, f"{folder} is not on the volume, and was too large to be sent with the job")
    aside = folder.with_name(f"{folder.name}.aside-{os.uname().nodename}-{os.getpid()}")
    try:
        with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts)), mode="r:gz") as archive:
            # Links to data lead out of the folder, which Python forbids by default from 3.14 on.
            archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            archive.extractall(aside)  # noqa: S202  # sent by the one whose code runs here
        (aside / WHOLE).unlink()
        aside.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else a pod of another host was faster
            raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def place_order(launch: Path, order: str, host: str) -> None:
    """Write what is to be run, unless it is there; a new order forgets that an earlier one was asked to stop.

    Raises:
        CannotStart: the run on the volume was sent from elsewhere.
    """
    path = launch / "order.json"
    if path.exists():
        before = path.read_text(encoding="utf-8")
        if before == order:
            return
        theirs, ours = json.loads(before).get("owner"), json.loads(order).get("owner")
        if theirs != ours:
            raise CannotStart(NOT_OURS, f"the volume has a run of that name already, sent from {theirs}")
        (launch / "stop").unlink(missing_ok=True)
    aside = launch / f"order.json.aside-{host}"
    aside.write_text(order, encoding="utf-8")
    aside.replace(path)


def hold(lock: Path, patience_s: float) -> None:
    """Wait until no earlier pod holds this host's lock, and hold it until this process ends.

    A pod that is being ended may still write its last checkpoint while the next one starts.

    Raises:
        CannotStart: it is still held after `patience_s`.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise CannotStart(STILL_HELD, f"an earlier pod still holds {lock} after {patience_s:g} s") from None
            time.sleep(0.2)
        except OSError as error:  # a volume without locks
            print(f"{lock}: {error}: nothing stops two pods from using this volume at once", file=sys.stderr)  # noqa: T201
            return


def say_why(state: Path, message: Path) -> None:
    """Leave the host's last state as termination message; nothing is left where either cannot be used."""
    try:
        said = json.loads(state.read_text(encoding="utf-8"))
        text = json.dumps({key: said.get(key) for key in ("phase", "why", "evidence", "samples")})
        message.write_text(text[:_MOST_MESSAGE], encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"no termination message: {error}", file=sys.stderr)  # noqa: T201  # read by `kubectl logs`


if __name__ == "__main__":
    try:
        sys.exit(run(Path(sys.argv[1]), dict(os.environ)))
    except CannotStart as problem:
        print(problem, file=sys.stderr)  # noqa: T201  # read by `kubectl logs`
        sys.exit(problem.code)
