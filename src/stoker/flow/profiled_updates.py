"""`stoker train --profile`: PyTorch's profiler beside a run, and its files in the run's directory."""

from __future__ import annotations

from stoker.flow.starting import Session
from stoker.profiling.torch_profile import ProfiledSource, TorchProfile
from stoker.store import disk_errors
from stoker.store.files import make_directories


def profile_updates(session: Session) -> None:
    """Profile some of the updates that `session.loop` is about to make; what is learned does not change.

    Raises:
        RunFailed: the directory for the files cannot be made.
    """
    directory, loop, telemetry = session.directory, session.loop, session.loop.telemetry
    with disk_errors(directory.profile_path, "the profile's directory"):
        make_directories(directory.profile_path)
    profile = TorchProfile(loop.step, directory.profile_path, directory.name)

    def written() -> None:
        if profile.table is not None:
            directory.write_kernels(profile.table)
        else:
            telemetry.emit("warned", message=f"there is no profile: {profile.problem}")
        telemetry.lap("profiling")

    loop.source = ProfiledSource.of(loop.source, profile, written)
    session.is_profiled = True
