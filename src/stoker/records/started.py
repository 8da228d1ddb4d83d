"""Where a run was first started: what relative paths in its job mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Started:
    """The working directory and the job file, both absolute, on the machine that began the run."""

    schema: ClassVar[int] = 1
    folder: str
    job_file: str
