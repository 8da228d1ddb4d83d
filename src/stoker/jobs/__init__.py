"""The Job and its parts, as a user writes them. Live objects, no torch."""

from stoker.jobs.averages import EMA
from stoker.jobs.job import LOSSES, METRICS, Holdout, Job, Loss, holdout
from stoker.jobs.job_file import Entry, load_job
from stoker.jobs.optimizers import SGD, Adam, AdamW, Muon, Optimizer
from stoker.jobs.sync import DiLoCo, LocalSGD, Sync
