"""Batches that are not a plain number: chosen by the gradient's noise (`auto`), or stated in tokens (`tokens`).

`Job(batch=stoker.auto(base=64))`. What: the batch becomes a power of two times `base`, at most the noise scale; the
learning rate, stated for `base`, is scaled. `stoker.plan`, `train` and `verify` measure the noise first, so that plain
numbers are recorded.
Use when: a learning rate is known for a small batch, and updates are too many or devices idle.
Costs: a few per cent of the run's samples, once; the result is stored.
Does not combine with: `until` in updates (other amounts of data per batch), losses over the whole batch, optimisers
whose learning rate Stoker does not know how to scale.
Source: McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, equations 2.6 and 2.8; ours differs in that the batch
is never below the one for which the learning rate is known.

`Job(batch=stoker.tokens(16_384))`. What: each update averages over as many whole samples as have at most that many
tokens; the loss divides by valid tokens, as always.
Use when: lengths differ much, so that a fixed number of samples would make updates of very different size.
Costs: every length has to be known before the first update.
Does not combine with: streams, sampling, models whose samples influence one another (batch norm, contrastive losses),
a step of the job's own, `sync`.
Source: the batches of Ott et al. 2019, https://arxiv.org/abs/1904.01038 (`--max-tokens`), which count padding; ours do
with `padded=True`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from stoker.errors import BadJob
from stoker.jobs.numeric_settings import is_count
from stoker.jobs.optimizers import SGD, Adam, AdamW, Optimizer
from stoker.jobs.sampling import Sampling, as_array

if TYPE_CHECKING:
    from stoker.jobs.job import Job


AUTO_BASE = 64
"""The batch for which the learning rate is stated, unless given otherwise [samples]."""

_EXPONENTS: dict[type[Optimizer], float] = {SGD: 1.0, Adam: 0.5, AdamW: 0.5}
"""The best learning rate grows as this power of the batch, far below the noise scale.

SGD: Goyal et al. 2017, https://arxiv.org/abs/1706.02677. Adam: Malladi et al. 2022, https://arxiv.org/abs/2205.10287.
"""


@dataclass(frozen=True)
class AutoBatch:
    """A batch still to be chosen: `base` samples times a power of two; the learning rate is stated for `base`.

    `most` is the largest batch that may be chosen [samples]; None: no limit but the data.
    """

    base: int = AUTO_BASE
    most: int | None = None

    def __repr__(self) -> str:
        """The call that makes it."""
        return f"stoker.auto(base={self.base}{'' if self.most is None else f', most={self.most}'})"


def auto(*, base: int = AUTO_BASE, most: int | None = None) -> AutoBatch:
    """A batch chosen by the gradient's noise scale: `base` times a power of two.

    Args:
        base: the batch for which the optimiser's learning rate is stated, and the smallest to choose [samples].
        most: the largest batch to choose [samples].

    Raises:
        BadJob: `base` is not a positive integer, or `most` is below it.
    """
    if not (is_count(base) and (most is None or (is_count(most) and most >= base))):
        raise BadJob(
            f"stoker.auto(base={base!r}, most={most!r}): wanted whole numbers of samples, 1 <= base <= most",
            remedy="Say for which batch the learning rate was chosen: batch=stoker.auto(base=64).",
        )
    return AutoBatch(base, most)


def scalable(optimizer: object) -> tuple[Optimizer, float]:
    """The optimiser, and the power of the batch with which its learning rate grows far below the noise scale.

    Raises:
        BadJob: the power is not known.
    """
    exponent = _EXPONENTS.get(type(optimizer)) if isinstance(optimizer, Optimizer) else None
    if not isinstance(optimizer, Optimizer) or exponent is None:
        name = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else "a function that makes one"
        raise BadJob(
            f'Job(batch="auto") scales the learning rate of stoker.SGD, Adam and AdamW; this optimiser is {name}',
            remedy="Give one of those, or a number as the batch.",
        )
    return optimizer, exponent


def rate_factor(base: int, batch: int, *, noise_scale: float, exponent: float) -> float:
    """Factor of the learning rate when the batch changes from `base` to `batch` samples [1].

    ((1 + noise_scale / base) / (1 + noise_scale / batch)) ** exponent: (batch / base) ** exponent while both are far
    below the noise scale, levelling off towards it.

    Source: McCandlish et al. 2018, equation 2.6 for SGD, section 2.2 for an exponent below 1.

    >>> [round(rate_factor(64, 256, noise_scale=scale, exponent=1.0), 3) for scale in (1e9, 256.0, 0.0)]
    [4.0, 2.5, 1.0]
    """
    # Multiplied out, so that an infinite noise scale is the limit, not inf / inf.
    share = 0.0 if noise_scale == float("inf") else 1 / max(noise_scale, 1e-30)
    return float(((share + 1 / base) / (share + 1 / batch)) ** exponent)


def with_rates_scaled(optimizer: Optimizer, factor: float) -> Optimizer:
    """The same optimiser with its learning rate, and those of its groups, multiplied by `factor`."""
    groups = {
        pattern: {name: value * factor if name == "lr" else value for name, value in settings.items()}
        for pattern, settings in optimizer.groups.items()
    }
    return dataclasses.replace(optimizer, lr=optimizer.lr * factor, groups=groups)


def largest_batch(base: int, noise_scale: float, limit: int) -> int:
    """`base` times the largest power of two within the noise scale and `limit`, at least `base` [samples].

    >>> largest_batch(64, 700.0, 10_000), largest_batch(64, 700.0, 300), largest_batch(64, 10.0, 300)
    (512, 256, 64)
    """
    batch = base
    while 2 * batch <= min(noise_scale, limit):
        batch *= 2
    return batch


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A batch of at most `num_tokens` tokens; in a resolved job of at most `num_samples` samples.

    `length_of` is the length of a sample, as `stoker.lengths.bucketed` takes it. With `is_padded` padding counts: the
    number of samples times the longest of them.
    """

    num_tokens: int
    length_of: Any = None
    _: KW_ONLY
    is_padded: bool = False
    num_samples: int | None = None

    def __repr__(self) -> str:
        """The call that makes it."""
        return f"stoker.tokens({self.num_tokens}{', padded=True' if self.is_padded else ''})"


def tokens(num_tokens: int, *, length_of: Any = None, padded: bool = False) -> TokenBatch:
    """A batch of as many whole samples as have at most `num_tokens` tokens together.

    Every sample comes once an epoch, all epochs have the same number of updates, and a sample is never split. With
    `sampling=stoker.lengths.bucketed()` samples of similar length share a batch; with `packed(into)` a batch is as many
    rows as hold that many tokens.

    Args:
        num_tokens: the most tokens in a batch.
        length_of: a function of a sample, or one length for each sample of `data` (default: the first dimension of its
            first entry); with bucketed and packed samples it is given there. A function reads every sample once when
            the job is resolved.
        padded: count padding too: the number of samples times the longest of them, which bounds a batch's memory.

    Raises:
        BadJob: `num_tokens` is not a positive integer.
    """
    if not is_count(num_tokens):
        raise BadJob(
            f"stoker.tokens({num_tokens!r}): wanted a whole number of tokens, 1 or more",
            remedy="Say how many an update averages over: batch=stoker.tokens(16_384).",
        )
    if length_of is not None and not callable(length_of):
        length_of = as_array(length_of, "lengths")
    return TokenBatch(num_tokens, length_of, is_padded=padded)


def token_checks(job: Job) -> Iterator[tuple[str, bool, str]]:
    """Checks of batches with different numbers of samples: the field, whether it is valid, and the problem if not."""
    batch = job.batch
    if not isinstance(batch, TokenBatch):
        return
    why = f"batch={batch!r} makes batches of different numbers of samples, which does not go with"
    goes = not isinstance(job.sampling, Sampling)
    yield "sampling", goes, f"{why} sampling: give the batch as a number"
    for name in ("step", "sync", "coupling_group"):
        yield name, getattr(job, name) is None, f"{why} {name}: give the batch as a number"
    yield "loss", job.objective.scope == "sample", f"{why} a loss over the whole batch: give the batch as a number"
    has_one_length = job.sampling is None or batch.length_of is None
    yield "batch", has_one_length, "sampling=… says how long samples are: leave out length_of of stoker.tokens(…)"
