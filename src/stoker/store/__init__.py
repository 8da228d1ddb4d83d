"""Run directories, their locks, checkpoints on disk, and the caches: where records are kept."""

from stoker.store.checkpoint_store import MANIFEST, CheckpointStore, Draft, checkpoint_name
from stoker.store.disk_errors import disk_errors
from stoker.store.files import append_line, make_directories, read_lines, sha256_file, write_atomic, write_file
from stoker.store.locations import cache_root, runs_root
from stoker.store.locks import Holder, RunLock, is_held_here
from stoker.store.record_caches import calibration_log, ceilings_cache, operations_cache, operations_key, trace_cache
from stoker.store.run_directory import RunDirectory
from stoker.store.run_identity import (
    LATEST,
    RunChoice,
    choose_directory,
    default_directory,
    describe_changes,
    find_run,
    headway_of,
    list_runs,
    name_in,
    require_same_spec,
    unfinished_before,
)

__all__ = [
    "LATEST",
    "MANIFEST",
    "CheckpointStore",
    "Draft",
    "Holder",
    "RunChoice",
    "RunDirectory",
    "RunLock",
    "append_line",
    "cache_root",
    "calibration_log",
    "ceilings_cache",
    "checkpoint_name",
    "choose_directory",
    "default_directory",
    "describe_changes",
    "disk_errors",
    "find_run",
    "headway_of",
    "is_held_here",
    "list_runs",
    "make_directories",
    "name_in",
    "operations_cache",
    "operations_key",
    "read_lines",
    "require_same_spec",
    "runs_root",
    "sha256_file",
    "trace_cache",
    "unfinished_before",
    "write_atomic",
    "write_file",
]
