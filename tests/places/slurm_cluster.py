"""A real Slurm on this machine: munge, slurmctld and a slurmd for each node, as this user, all in one directory.

    python tests/places/slurm_cluster.py DIRECTORY      starts it, and prints the variable by which commands find it

Needs Debian's packages (`apt-get install slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins`, without starting
their services); no root: nodes run jobs of the user who started them alone. Every node claims four GPUs `a100`, which
are links to /dev/null. Partitions, all over both nodes:

    low     the default; its jobs give way to those of `high`: asked to leave, requeued 5 s later
    high    takes the nodes of `low`
    short   jobs of a minute at most
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "sinfo", "scancel")
NODES = ("n1", "n2")
PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins"
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacctmgr", "sacct")
ACCOUNTING_PACKAGES = "slurmdbd mariadb-server"
_CPUS, _MEMORY_MIB, _GPUS = 4, 6000, 4
_START_S, _STOP_S = 30.0, 15.0

_CONFIG = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdParameters=config_overrides
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_min_interval=200000,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PreemptExemptTime=00:00:00
JobRequeue=1
KillWait=10
MinJobAge={min_job_age_s}
InactiveLimit=0
GresTypes=gpu
AccountingStorageType={accounting}
{accounting_more}
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=1-00:00:00 DefaultTime=10 State=UP PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL MaxTime=1-00:00:00 DefaultTime=10 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=ALL MaxTime=1 DefaultTime=1 State=UP PriorityTier=1 PreemptMode=OFF
"""


_DBD_CONFIG = """\
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={dbd_port}
SlurmUser={user}
PidFile={directory}/slurmdbd.pid
LogFile={directory}/slurmdbd.log
PluginDir={plugins}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
"""


def missing(*, accounting: bool = False) -> str:
    """Why no cluster can be started here, or ''."""
    programs = (*PROGRAMS, *(ACCOUNTING_PROGRAMS if accounting else ()))
    absent = [program for program in programs if _program(program) is None]
    packages = f"{PACKAGES} {ACCOUNTING_PACKAGES}" if accounting else PACKAGES
    return f"needs Slurm ({', '.join(absent)} not found): apt-get install {packages}" if absent else ""


@dataclass
class SlurmCluster:
    """The cluster in a directory; `environ` are the variables with which commands reach it.

    Args:
        directory: short, new or of a cluster that was stopped; sockets are in it.
        min_job_age_s: how long the controller knows jobs that ended [s].
        accounting: with slurmdbd and a database, in which this user has the account `ml`, and no other is accepted.
    """

    directory: Path
    min_job_age_s: int = 300
    accounting: bool = False
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        """Of this process, and where the configuration is."""
        return {**os.environ, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def start(self) -> None:
        """Start everything, and wait until both nodes are idle."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o755)  # munged refuses a directory that others can write
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.directory / name).mkdir(exist_ok=True)
        key = self.directory / "munge.key"
        if not key.exists():
            key.touch(0o600)
            key.write_bytes(secrets.token_bytes(128))
        ports = _free_ports(3 + len(NODES))
        self._configure(*ports)
        self.start_munge()
        if self.accounting:
            self._start_accounting(ports[1], ports[2])
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.wait_for(self.is_idle, "idle nodes")

    def is_idle(self) -> bool:
        """Whether all nodes wait for jobs."""
        return self.run("sinfo", "-h", "-o", "%T", "-p", "low").split() == ["idle"]

    def start_munge(self) -> None:
        """Start the daemon that authenticates."""
        at = self.directory
        self._daemon(
            "munged",
            "--foreground",
            f"--key-file={at}/munge.key",
            f"--socket={at}/munge.socket",
            f"--pid-file={at}/munge.pid",
            f"--log-file={at}/munge.log",
            f"--seed-file={at}/munge.seed",
            "--force",
        )
        self.wait_for((at / "munge.socket").exists, "munge's socket")

    def start_controller(self) -> None:
        """Start the controller, and wait until it answers."""
        self._daemon("slurmctld", "-D", "-f", str(self.directory / "slurm.conf"))
        self.wait_for(lambda: "UP" in self.output("scontrol", "ping"), "an answer of slurmctld")

    def start_node(self, node: str, hidden: Path | None = None) -> None:
        """Start a node; as root it can be one that sees an empty folder in place of `hidden`."""
        command = ["slurmd", "-D", "-N", node, "-f", str(self.directory / "slurm.conf")]
        if hidden is not None:
            command = [
                "unshare",
                "-m",
                "sh",
                "-c",
                'mount -t tmpfs none "$1" && shift && exec "$@"',
                "sh",
                str(hidden),
                *command,
            ]
        self._daemon(*command, name=node)

    def send_signal(self, name: str, number: int) -> None:
        """Send a signal to a daemon."""
        self._processes[name].send_signal(number)

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """End a daemon by its process: `munged`, `slurmctld`, or a node's name."""
        process = self._processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Cancel all jobs and end all daemons."""
        if "slurmctld" in self._processes and "munged" in self._processes:
            self.output("scancel", "--full", "-u", _user())
            deadline = time.monotonic() + _STOP_S
            while self.output("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.1)
        nodes = [name for name in self._processes if name in NODES]
        for name in [*nodes, "slurmctld", "slurmdbd", "mariadbd", "munged"]:
            if name in self._processes:
                self.end(name)

    def run(self, *command: str, environ: Mapping[str, str] | None = None) -> str:
        """Output of a command of Slurm, which has to succeed."""
        done = subprocess.run(
            command, env=self.environ | dict(environ or {}), capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    def wait_for(self, holds: Callable[[], object], what: str, within_s: float = _START_S) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                if holds():
                    return
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} within {within_s:g} s; see the logs in {self.directory}")
            time.sleep(0.1)

    def output(self, *command: str) -> str:
        """Output of a command of Slurm; "" if it fails."""
        try:
            return self.run(*command)
        except RuntimeError:
            return ""

    def _daemon(self, program: str, *arguments: str, name: str = "") -> None:
        path = _program(program)
        assert path is not None, missing()
        log = (self.directory / f"{name or program}.out").open("ab")
        with log:
            self._processes[name or program] = subprocess.Popen(
                # A daemon does not outlive this process, however that ends.
                ["setpriv", "--pdeathsig", "TERM", path, *arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _start_accounting(self, dbd_port: int, database_port: int) -> None:
        """Start a database for slurmdbd, slurmdbd, and give this user an account."""
        at, password = self.directory, secrets.token_hex(16)
        data, first = at / "database", at / "database.sql"
        first.write_text(
            f"CREATE DATABASE slurm;\nCREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{password}';\n"
            "GRANT ALL ON slurm.* TO slurm@'127.0.0.1';\n"
        )
        first.chmod(0o600)
        install = _program("mariadb-install-db")
        assert install is not None, missing(accounting=True)
        own = ["--no-defaults", f"--datadir={data}", f"--user={_user()}"]
        subprocess.run([install, *own, "--skip-test-db"], check=True, capture_output=True, timeout=120)
        self._daemon(
            "mariadbd",
            *own,
            f"--socket={at}/database.socket",
            "--bind-address=127.0.0.1",
            f"--port={database_port}",
            "--skip-name-resolve",
            f"--init-file={first}",
            f"--pid-file={at}/database.pid",
            "--innodb-buffer-pool-size=32M",
            "--innodb-lock-wait-timeout=900",
        )
        self.wait_for((at / "database.socket").exists, "database")
        config = at / "slurmdbd.conf"
        config.touch(0o600)
        config.write_text(
            _DBD_CONFIG.format(
                directory=at,
                host=_host(),
                dbd_port=dbd_port,
                user=_user(),
                plugins=_plugins(),
                database_port=database_port,
                password=password,
            )
        )
        self._daemon("slurmdbd", "-D")
        self.wait_for(lambda: self.run("sacctmgr", "-n", "list", "cluster") is not None, "slurmdbd")
        self.run("sacctmgr", "-i", "add", "cluster", "test")
        self.run("sacctmgr", "-i", "add", "account", "ml", "Description=tests", "Organization=tests")
        self.run("sacctmgr", "-i", "add", "user", _user(), "Account=ml")

    def _configure(self, controller_port: int, dbd_port: int, _database_port: int, *node_ports: int) -> None:
        host, address = _host(), "127.0.0.1"
        more = (
            f"AccountingStorageHost={address}\nAccountingStoragePort={dbd_port}\nAccountingStorageEnforce=limits,qos\n"
            f"AccountingStoragePass={self.directory}/munge.socket"
        )
        gpus = [self.directory / f"gpu{index}" for index in range(_GPUS)]
        for gpu in gpus:
            if not gpu.is_symlink():
                gpu.symlink_to("/dev/null")  # Slurm wants a device, and no right is needed for a link
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr={address} Port={port} CPUs={_CPUS} RealMemory={_MEMORY_MIB} "
            f"Gres=gpu:a100:{_GPUS} State=UNKNOWN"
            for node, port in zip(NODES, node_ports, strict=True)
        )
        (self.directory / "slurm.conf").write_text(
            _CONFIG.format(
                host=host,
                address=address,
                user=_user(),
                controller_port=controller_port,
                directory=self.directory,
                plugins=_plugins(),
                min_job_age_s=self.min_job_age_s,
                accounting=f"accounting_storage/{'slurmdbd' if self.accounting else 'none'}",
                accounting_more=more if self.accounting else "",
                nodes=nodes,
            )
        )
        (self.directory / "gres.conf").write_text(f"Name=gpu Type=a100 File={self.directory}/gpu[0-{_GPUS - 1}]\n")


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _plugins() -> str:
    """The folder of Slurm's plug-ins."""
    for root in (Path("/usr/lib"), Path("/usr/lib64")):
        for plugin in root.glob("**/auth_munge.so"):
            return str(plugin.parent)
    raise RuntimeError("Slurm's plug-ins were not found")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    cluster = SlurmCluster(Path(sys.argv[1]).resolve())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())
    try:
        cluster.start()
        print(f"export SLURM_CONF={cluster.directory / 'slurm.conf'}", flush=True)
        signal.pause()
    finally:
        cluster.stop()
