"""What Slurm's commands say, read from texts that Slurm 22.05 and users' clusters printed."""

from __future__ import annotations

import pytest

from stoker.errors import PlaceFailed, PlaceUnreachable
from stoker.launching.launcher import is_model
from stoker.launching.slurm_scheduler import (
    Partition,
    SlurmJob,
    limits_text,
    partition_named,
    phase_of,
    preempting,
    read_accounted_job,
    read_estimate,
    read_job,
    read_partitions,
    refusal,
    seconds_of,
    slurm_time,
)

SINFO = """\
low*|up|1-00:00:00|10:00|1-infinite|2|4|6000|idle|(null)|gpu:a100:4(S:0-1)
low*|up|1-00:00:00|10:00|1-infinite|3|64|500000|mixed|avx512,ib|gpu:nvidia_h100_80gb_hbm3:8,nvme:1
low*|up|1-00:00:00|10:00|1-infinite|9|64|500000|down*|(null)|gpu:a100:8
short|up|1:00|n/a|1-2|2|4|6000|idle|(null)|gpu:2
old|inact|infinite|n/a|1|2|4|6000|idle|(null)|(null)
"""
DETAILS = """\
PartitionName=low AllowGroups=ALL GraceTime=20 MaxTime=1-00:00:00 PriorityJobFactor=1 PriorityTier=1 PreemptMode=REQUEUE
PartitionName=short AllowGroups=ALL GraceTime=0 MaxTime=00:01:00 PriorityJobFactor=1 PriorityTier=10 PreemptMode=OFF
PartitionName=old AllowGroups=ALL GraceTime=0 MaxTime=UNLIMITED PriorityJobFactor=1 PriorityTier=1 PreemptMode=OFF
"""
MUNGE = """\
sinfo: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file (Did you start munged?)
slurm_load_partitions: Protocol authentication error
"""
JOB = (
    "JobId=3 JobName=b.sh UserId=root(0) Priority=4294901757 Nice=0 Account=(null) QOS=(null) JobState={state} "
    "Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={exit} "
    "RunTime=00:00:03 TimeLimit=00:10:00 StartTime=2026-11-25T22:46:35 EndTime=Unknown PreemptTime={preempted} "
    "Partition=low NodeList=n[1-2] NumNodes=2 Comment=JobState=FAILED"
)


@pytest.fixture
def partitions() -> dict[str, Partition]:
    """The partitions of the texts above."""
    return read_partitions(SINFO, DETAILS)


def job(
    state: str, reason: str = "None", restarts: int = 0, exit_code: str = "0:0", preempted: str = "None"
) -> SlurmJob:
    """A job as scontrol shows it."""
    found = read_job(JOB.format(state=state, reason=reason, restarts=restarts, exit=exit_code, preempted=preempted))
    assert found is not None
    return found


def test_partitions_have_their_limits_nodes_and_gpus(partitions: dict[str, Partition]) -> None:
    """Limits, default, preemption and kinds of nodes come from sinfo and scontrol together."""
    low = partitions["low"]
    assert (low.is_default, low.max_time_s, low.default_time_s, low.max_nodes) == (True, 86400.0, 600.0, None)
    assert (low.preempt_mode, low.grace_s) == ("REQUEUE", 20.0)
    assert low.gpu_types == ("a100", "nvidia_h100_80gb_hbm3")
    assert partitions["short"].max_nodes == 2
    assert not partitions["old"].is_up
    assert preempting(low, list(partitions.values())) == ["short"]
    assert preempting(partitions["short"], list(partitions.values())) == []
    assert limits_text(low) == "at most 1 d; jobs may be preempted (requeue, 20.0 s to leave)"


@pytest.mark.parametrize(
    ("partition", "device", "each", "nodes", "why"),
    [
        ("low", "a100", 4, 2, ""),
        ("low", "h100", 8, 3, ""),
        ("low", "cpu", 2, 5, ""),
        ("low", "a100", 8, 1, "Partition low has 2 nodes with at most 4 × a100 each; 1 with 8 each are asked for."),
        ("low", "a100", 4, 3, "Partition low has 2 nodes with at most 4 × a100 each; 3 with 4 each are asked for."),
        ("low", "cpu", 1, 6, "Partition low has 5 usable nodes; 6 are asked for."),
        ("low", "l4", 1, 1, "Partition low has no l4; it has a100, nvidia_h100_80gb_hbm3."),
        ("short", "a100", 2, 2, ""),
        ("short", "cpu", 1, 3, "Partition short allows 2 nodes a job; 3 are asked for."),
        ("old", "cpu", 1, 1, "Partition old takes no jobs now."),
    ],
)
def test_a_shape_that_can_never_run_is_refused_with_numbers(
    partitions: dict[str, Partition], partition: str, device: str, each: int, nodes: int, why: str
) -> None:
    """Slurm accepts some such jobs and leaves them in the queue for ever; nodes that are down do not count."""
    assert partitions[partition].why_not(device=device, each=each, num_nodes=nodes) == why


def test_gpus_are_asked_for_by_the_name_they_have_there(partitions: dict[str, Partition]) -> None:
    """`h100` is `nvidia_h100_80gb_hbm3` on this cluster; GPUs without a name are asked for without one."""
    assert partitions["low"].gpu_type("h100") == "nvidia_h100_80gb_hbm3"
    assert partitions["low"].gpu_type("h100-80g") == "nvidia_h100_80gb_hbm3"
    assert partitions["short"].gpu_type("h100") == ""
    assert partitions["low"].gpu_type("gpu") == ""
    assert not is_model("a100", "a10")
    assert not is_model("A100-SXM4-80GB", "a100-40g")
    assert is_model("rtx4090", "rtx-4090")
    assert not is_model("NVIDIA H200", "gb200")


def test_an_unknown_partition_names_the_nearest(partitions: dict[str, Partition]) -> None:
    """A typing mistake is answered with the name that was meant."""
    with pytest.raises(PlaceFailed, match="there is no partition 'shrot' on box") as refused:
        partition_named("shrot", partitions, "box")
    assert refused.value.remedy is not None
    assert "Did you mean 'short'?" in refused.value.remedy
    assert partition_named("", partitions, "box").name == "low"


@pytest.mark.parametrize(
    ("found", "phase", "why"),
    [
        (job("PENDING"), "queued", "has not looked"),
        (job("PENDING", "Resources"), "queued", "nodes to become free"),
        (job("PENDING", "ReqNodeNotAvail,_UnavailableNodes:n1"), "queued", "down or reserved"),
        (job("PENDING", "BeginTime", restarts=2), "requeued", "start 3"),
        (job("CONFIGURING"), "starting", "made ready"),
        (job("RUNNING"), "starting", "on n[1-2]"),
        (job("RUNNING", preempted="2026-11-25T22:46:38"), "preempted", "saves and leaves"),
        (job("SUSPENDED"), "preempted", "suspended"),
        (job("COMPLETING"), "saving", "leaves its nodes"),
        (job("COMPLETED"), "finished", "trained"),
        (job("FAILED", "NonZeroExitCode", exit_code="130:0"), "stopped", "saved and left"),
        (job("FAILED", "NonZeroExitCode", exit_code="4:0"), "failed", "exit code 4"),
        (job("FAILED", exit_code="0:53"), "failed", "do not see the run's directory"),
        (job("CANCELLED"), "stopped", "scancel"),
        (job("TIMEOUT"), "stopped", "time limit"),
        (job("PREEMPTED"), "stopped", "does not requeue"),
        (job("NODE_FAIL"), "lost", "node failed"),
        (job("OUT_OF_MEMORY"), "failed", "memory"),
        (job("SOMETHING_NEW"), "unknown", "SOMETHING_NEW"),
    ],
)
def test_each_state_has_a_phase_and_a_reason(found: SlurmJob, phase: str, why: str) -> None:
    """A state that Slurm does not document is unknown, not ended."""
    assert phase_of(found)[0] == phase
    assert why in phase_of(found)[1]


def test_a_job_is_read_with_its_evidence() -> None:
    """A comment that looks like a field changes nothing; times are seconds; what Slurm said is kept."""
    found = job("PENDING", "Resources", restarts=1)
    assert (found.state, found.restarts, found.nodes) == ("PENDING", 1, "n[1-2]")
    assert found.starts_at == 1795646795.0
    assert found.line.startswith("JobId=3 JobState=PENDING Reason=Resources Restarts=1 ExitCode=0:0")
    assert read_job("slurm_load_jobs error: Invalid job id specified") is None


def test_accounting_counts_starts() -> None:
    """`sacct -D` has a row for each start; a cancelled job's state has words behind it."""
    found = read_accounted_job("PREEMPTED|0:0|7\nCANCELLED by 1000|0:15|7\n")
    assert found is not None
    assert (found.state, found.signal, found.restarts) == ("CANCELLED", 15, 1)
    assert read_accounted_job("Slurm accounting storage is disabled\n") is None


def test_the_estimated_start_is_read() -> None:
    """`sbatch --test-only` says it on standard error."""
    text = "sbatch: Job 9 to start at 2026-11-25T23:15:19 using 1 processors on nodes n1 in partition low"
    assert read_estimate(text) == (1795648519.0, "n1")
    assert read_estimate("allocation failure: Requested node configuration is not available") is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300.0),
        ("10:30", 630.0),
        ("1:00:00", 3600.0),
        ("2-0", 172800.0),
        ("1-12:30", 131400.0),
        ("UNLIMITED", None),
    ],
)
def test_durations_are_read_as_slurm_writes_them(text: str, seconds: float | None) -> None:
    """A lone number is minutes; behind days come hours."""
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("seconds", [1.0, 59.0, 60.0, 3601.0, 86400.0, 200_000.0])
def test_a_limit_is_never_shorter_than_asked_for(seconds: float) -> None:
    """Slurm counts minutes: limits are rounded up."""
    read = seconds_of(slurm_time(seconds))
    assert read is not None
    assert seconds <= read < seconds + 60


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            PlaceFailed,
            "the account ml may not use partition gpu",
        ),
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", PlaceFailed, "no partition"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", PlaceFailed, "the QoS (default)"),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            PlaceFailed,
            "has no nodes with what is asked for",
        ),
        ("sh: 1: sinfo: not found", PlaceFailed, "commands were not found"),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", PlaceUnreachable, "slurmctld does not"),
        (
            "slurm_load_partitions: Unable to contact slurm controller (connect failure)",
            PlaceUnreachable,
            "slurmctld does not answer",
        ),
        (MUNGE, PlaceUnreachable, "munge, which authenticates, does not answer"),
    ],
)
def test_refusals_are_sentences_and_silence_is_told_from_them(said: str, kind: type, words: str) -> None:
    """Who does not answer is unreachable, and nothing follows from that; who refuses has a reason."""
    error = refusal(said, "login1", {"account": "ml", "partition": "gpu"})
    assert type(error) is kind
    assert words in error.message
    assert error.remedy
