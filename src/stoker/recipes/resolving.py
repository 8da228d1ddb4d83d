"""From a Job that names a recipe to the Job it stands for."""

from __future__ import annotations

from collections.abc import Callable

from stoker.jobs import Job
from stoker.recipes.fast import fast

RECIPES: dict[str, Callable[[Job], Job]] = {"fast": fast}
"""Recipes by the names that `Job(recipe=…)` takes."""


def resolved(job: Job) -> Job:
    """The job with everything set that its recipe sets; a job without a recipe as it is. Twice is the same as once.

    Raises:
        BadJob: the recipe does not fit the job.
    """
    return job if job.recipe is None else RECIPES[job.recipe](job)
