"""Run directories, their locks, checkpoints on disk, and the caches: where records are kept."""

from stoker.store.checkpoint_store import MANIFEST, CheckpointStore, Draft, checkpoint_name
from stoker.store.disk_errors import disk_errors
from stoker.store.files import append_line, make_directories, read_lines, sha256_file, write_atomic, write_file
from stoker.store.locations import cache_root, runs_root
from stoker.store.locks import Holder, RunLock, is_held_here
from stoker.store.record_caches import CalibrationStore, CeilingsCache, MicroBenchmarkCache
from stoker.store.run_directory import RunDirectory
from stoker.store.run_identity import (
    LATEST,
    RunChoice,
    choose_directory,
    describe_changes,
    find_run,
    headway_of,
    list_runs,
    name_in,
    require_same_spec,
    unfinished_before,
)
from stoker.store.trace_cache import TraceCache

__all__ = [
    "LATEST",
    "MANIFEST",
    "CalibrationStore",
    "CeilingsCache",
    "CheckpointStore",
    "Draft",
    "Holder",
    "MicroBenchmarkCache",
    "RunChoice",
    "RunDirectory",
    "RunLock",
    "TraceCache",
    "append_line",
    "cache_root",
    "checkpoint_name",
    "choose_directory",
    "describe_changes",
    "disk_errors",
    "find_run",
    "headway_of",
    "is_held_here",
    "list_runs",
    "make_directories",
    "name_in",
    "read_lines",
    "require_same_spec",
    "runs_root",
    "sha256_file",
    "unfinished_before",
    "write_atomic",
    "write_file",
]  # fmt: skip
