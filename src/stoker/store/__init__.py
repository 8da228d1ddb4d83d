"""Run directories, their locks, checkpoints on disk, and the caches: where records are kept."""

from stoker.store.checkpoint_store import CheckpointStore, Draft, checkpoint_name
from stoker.store.disk_errors import disk_errors
from stoker.store.files import append_line, make_directories, read_lines, sha256_file, write_atomic, write_file
from stoker.store.locations import cache_root, runs_root
from stoker.store.locks import RunLock, is_held_here
from stoker.store.record_caches import calibration_log, ceilings_cache, operations_cache, operations_key, trace_cache
from stoker.store.run_directory import RunDirectory
from stoker.store.run_identity import (
    LATEST,
    choose_directory,
    default_directory,
    describe_changes,
    find_named,
    find_run,
    headway_of,
    list_runs,
    name_in,
    require_same_spec,
    unfinished_before,
)
