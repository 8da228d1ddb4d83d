"""A job with its data loaded, its model outlined and its open settings chosen; errors of the user's code named."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from stoker.activity import doing
from stoker.devices.cpu import attached_cpu
from stoker.errors import BadJob, DoesNotFit, StokerError
from stoker.jobs import Entry, Job
from stoker.jobs.batch_size import AutoBatch
from stoker.jobs.code_digest import is_installed
from stoker.jobs.job_description import describe_settings
from stoker.jobs.local_imports import is_in_folder
from stoker.jobs.run_length import Extent
from stoker.loading.datasets import Datasets, datasets_of
from stoker.loading.token_batches import with_batch_in_samples
from stoker.planning.automatic_batch import BatchChoice, with_batch
from stoker.recipes import resolved
from stoker.records import JobSpec
from stoker.stepping import losses
from stoker.stepping.frozen_parameters import describe_trained_share, with_freeze_in_updates
from stoker.stepping.model import build_model, bytes_of, meta_model, require_sizes, weights_digest
from stoker.stepping.step_failures import held_out_set_in_words, ran_out_of_memory, remedy_in
from stoker.units import format_bytes


@dataclass(frozen=True)
class ResolvedJob:
    """A job with its data, an outline of its model, and its identity on first use."""

    job: Job
    entry: Entry | None
    data: Datasets
    model: nn.Module
    """On PyTorch's meta device: sizes and types, no weights."""
    batch_choice: BatchChoice | None = None
    """How batch and learning rate were chosen, if the job left the batch open."""
    sites: int = 1
    """Sites that train it, each a process alone with its part of every batch; see `stepping.message_folder`."""
    warnings: tuple[str, ...] = ()
    """Settings that are likely to learn badly, one sentence each."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Choices made for the job that the user should know, one line each."""
        frozen = describe_trained_share(self.job, self.model)
        batch = None if self.batch_choice is None else self.batch_choice.in_words()
        early = "Job(stop=…) may end the run before its time: what is forecast is the whole" if self.job.stop else None
        return (*(note for note in (batch, frozen, early) if note is not None), *self.warnings)

    @property
    def extent(self) -> Extent:
        """The shape of its run."""
        return self.data.extent(self.job)

    @property
    def name(self) -> str:
        """The job's name: its own, its file's, or its model's."""
        stem = self.entry.path.stem if self.entry is not None else None
        return self.job.name or stem or type(self.model).__name__

    @functools.cached_property
    def spec(self) -> JobSpec:
        """Its identity, with a digest of the initial weights, which are built here once.

        Raises:
            DoesNotFit: not even the weights fit into this machine's memory.
        """
        require_room(self)
        entry, data = self.entry, self.data
        with doing("identifying the job"), users_code("making the job's data and model", entry):
            return JobSpec(
                name=self.name,
                entry=None if entry is None else entry.path.name,
                entry_digest=None if entry is None else entry.digest,
                parameters={} if entry is None else entry.parameters,
                settings=describe_settings(self.job),
                data_class=data.train.data_class,
                data_fingerprint=data.fingerprint(),
                num_train=len(data.train),
                weights_digest=weights_digest(build_model(self.job)),
                functions={} if entry is None else entry.functions,
            )


def resolve_job(job: Job, entry: Entry | None = None) -> ResolvedJob:
    """Load the job's data, outline its model, and choose its batch and learning rate if they were left open.

    Raises:
        BadJob: `job` is not a Job; its data or model cannot be used, or no batch can be chosen for it.
    """
    if not isinstance(job, Job):
        given = "a function" if callable(job) else f"{job!r}, of type {type(job).__name__}"
        raise BadJob(
            f"this takes a stoker.Job, got {given}",
            remedy="Call the function that makes it: stoker.train(job()); of a job file: stoker train FILE.",
        )
    with users_code("making the job's data and model", entry):
        job = resolved(job)
        data, model = datasets_of(job), meta_model(job)
        if not isinstance(model, nn.Module):
            raise BadJob(f"Job(model=…) made a {type(model).__name__}, wanted a torch.nn.Module")
        require_sizes(model)
        auto = job.batch if isinstance(job.batch, AutoBatch) else None
        if auto is not None:
            job = dataclasses.replace(job, batch=auto.base)  # until the noise of its gradient is known
        job = with_freeze_in_updates(with_batch_in_samples(job, data.train), data.extent(job))
    doubt = _doubt_of_types(model)
    prepared = ResolvedJob(job, entry, data, model, warnings=() if doubt is None else (doubt,))
    if auto is None:
        return _with_outer(prepared)
    with users_code('choosing the batch (batch="auto")', entry):
        job, choice = with_batch(job, auto.most, data, prepared.spec.digest())
    return _with_outer(dataclasses.replace(prepared, job=job, batch_choice=choice))


def _with_outer(prepared: ResolvedJob) -> ResolvedJob:
    """Choose the outer optimiser of `Job(sync=…)` by the number of exchanges in the run.

    Not for a run of a given time, whose number of updates is not known yet.
    """
    job = prepared.job
    if job.sync is None or job.until.unit == "seconds":
        return prepared
    sync, words = job.sync.for_run(job.batch_size, prepared.extent.updates_in(job.until))
    warnings = (*prepared.warnings, *(() if words is None else (words,)))
    return dataclasses.replace(prepared, job=dataclasses.replace(job, sync=sync), warnings=warnings)


def _doubt_of_types(model: nn.Module) -> str | None:
    """A warning of trained weights in half precision, as a pretrained model may be loaded in; None without any."""
    half = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}
    if not half:
        return None
    dtype = min(half, key=str)
    # Half a step, of a weight just below a power of two; of other weights up to twice as much.
    name, least = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps / 4
    return (
        f"trained weights are {name}: a change of less than {least:.2g} of a weight is rounded away, and so are most "
        "updates at a usual learning rate. Give the model in float32 (.float(), or dtype=torch.float32 of "
        "from_pretrained): plans compute in bf16 where that is faster"
    )


def require_room(prepared: ResolvedJob) -> None:
    """Refuse a job whose weights alone exceed this machine's memory.

    Raises:
        DoesNotFit: they exceed it.
    """
    needed, memory = bytes_of(prepared.model.parameters()), attached_cpu().memory_bytes
    if memory and needed > memory:
        raise DoesNotFit(
            f"the weights of {prepared.name} take {format_bytes(needed)}; this machine has {format_bytes(memory)}",
            remedy="`stoker plan` says what it needs elsewhere: stoker plan JOB --on all",
        )


@contextmanager
def users_code(what: str, entry: Entry | None, error: type[StokerError] = BadJob) -> Iterator[None]:
    """Turn an exception from the user's model, loss or data into an error that names the user's line.

    Out of memory becomes DoesNotFit before a run (`error` is BadJob), else `error`.
    """
    try:
        yield
    except StokerError:
        raise
    except Exception as problem:
        where = _users_line(problem, entry)
        lines, which = str(problem).strip().splitlines(), held_out_set_in_words(problem)
        summary = lines[0] if lines else "no message"
        if ran_out_of_memory(problem):
            raise (DoesNotFit if error is BadJob else error)(
                f"{what} ran out of memory{where}: {summary}",
                remedy="Take a smaller batch, coupling_group or model, or a plan with a smaller micro_batch (--plan).",
            ) from problem
        raise error(
            f"{what} raised {type(problem).__name__}{which}{where}: {summary}",
            remedy=_remedy(problem) or "Run again with --debug for the whole traceback.",
        ) from problem


def _remedy(problem: Exception) -> str | None:
    """Remedy for a usual mistake, recognised by PyTorch's and Python's messages."""
    if suggested := remedy_in(problem):
        return suggested
    message = str(problem)
    modules = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(problem.__traceback__)]
    layer = next(
        (repr(one) for one in reversed(modules) if isinstance(one, nn.Module) and not list(one.children())), "a layer"
    )
    if match := re.search(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", message):
        return f"{layer} takes {match[2]} values, and is given {match[1]}: let both be one number, in model or data."
    if match := re.search(r"expected input(\[.*?\]) to have (\d+) channels, but got (\d+)", message):
        return (
            f"{layer} takes {match[2]} channels, and is given {match[3]} in a batch of {match[1]}, of which the second "
            "number is the channels: let both be one number, in model or data."
        )
    if (match := re.match(r"'(\w+)' object (is not callable|has no attribute)", message)) and (
        name := _taken_for_model(problem, match[1])
    ):
        return (
            f"`{name}` is the model's output, a {match[1]}: a loss or metric is called as loss(output, target), or as "
            "loss(model, batch) if its first parameter is called `model`. Call it that to be given the model."
        )
    if "'tuple' object has no attribute" in message:
        return (
            "A batch is a tuple of the data's entries, also of a single array: `(inputs,) = batch`. Some layers return "
            "tuples as well, such as LSTMs."
        )
    if "does not require grad" in message:
        return (
            "The loss does not depend on the weights by way of autograd: look for .detach(), .item(), .data, "
            ".numpy(), argmax or torch.no_grad() between the model's weights and the loss."
        )
    if match := re.search(r"forward\(\) missing \d+ required positional arguments?: (.*)", message):
        return (
            f"The model also takes {match[1]}, and is given one input: name what goes into it, as by "
            "stoker.Fields(inputs=[0, 1]) of samples that are tuples, or give a loss of the form loss(model, batch)."
        )
    if match := re.search(r"forward\(\) got an unexpected keyword argument '(\w+)'", message):
        return (
            f"Entries of samples that are dicts go into the model by their names, all but the target, and it takes no "
            f"{match[1]!r}: name those that it takes, as by stoker.Fields(inputs=[…], target=…); one alone is passed "
            "without its name."
        )
    if re.search(r"takes \d+ positional arguments? but \d+ (was|were) given", message):
        return (
            "A loss is called as loss(output, target), or as loss(model, batch) if its first parameter is called "
            "`model`; a model with one input, or with those that stoker.Fields(inputs=…) names."
        )
    if match := re.search(r"same dtype, but got:? (\w+) and (\w+)", message):
        return (
            f"{layer} computes in one type, and is given {match[1].lower()} for {match[2].lower()}: give inputs as "
            "float32 (.float(), .astype('float32')), or a model of theirs (.double())."
        )
    if "index out of range in self" in message:
        return f"An index is not below the number of rows of {layer}: look at the largest in the data, and at padding."
    return None


def _taken_for_model(problem: Exception, kind: str) -> str | None:
    """The name of a loss's or metric's first parameter, if that is given an output, of the type `kind`."""
    frames = [frame for frame, _ in traceback.walk_tb(problem.__traceback__)]
    for caller, called in itertools.pairwise(frames):
        if caller.f_code.co_filename == losses.__file__ != called.f_code.co_filename:
            code = called.f_code
            name = next((name for name in code.co_varnames[: code.co_argcount] if name != "self"), "model")
            if name != "model" and type(called.f_locals.get(name)).__name__ == kind:
                return name
    return None


def _users_line(problem: Exception, entry: Entry | None) -> str:
    """` (train_me.py, line 12: `…`)` if the traceback passes through the user's files, else empty."""
    own, python = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        path = Path(frame.filename)
        if entry is not None:
            is_users = is_in_folder(path, entry.path.parent)
        else:  # neither Stoker's, nor installed, nor Python's own, nor made up (`<string>`)
            is_others = path.is_relative_to(own) or path.is_relative_to(python) or is_installed(path)
            is_users = path.is_absolute() and not is_others
        if is_users:
            return f" ({path.name}, line {frame.lineno}: `{frame.line}`)"
    return ""
