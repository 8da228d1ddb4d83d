"""`Job(batch=stoker.auto(base=64))`: a batch chosen by the gradient's noise, and its learning rate.

What: the batch becomes a power of two times `base`, at most the noise scale; the learning rate, stated for `base`,
follows. `stoker.plan`, `train` and `verify` measure the noise first, so that what is recorded are plain numbers.
Use when: a learning rate is known for a small batch, and updates are too many or devices idle.
Costs: a few per cent of the run's samples, once; the answer is kept.
Does not combine with: `until` in updates (another amount of data under each batch), losses over the whole batch,
optimisers whose learning rate Stoker does not know how to scale.
Source: McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, equations 2.6 and 2.8; ours differs in that the batch
is never below the one for which the learning rate is known.

`Job(batch=stoker.tokens(16_384))`: a batch stated in tokens, of as many whole samples as it has room for.

What: each update averages over samples whose tokens together come near a number and stay within it; the loss divides
by valid tokens, as always. Use when: lengths differ much, so that a fixed number of samples is now a large update, now
a small one. Costs: every length has to be known before the first update.
Does not combine with: streams, sampling, models whose samples influence one another (batch norm, contrastive losses),
a step of the job's own, `sync`.
Source: the batches of Ott et al. 2019, https://arxiv.org/abs/1904.01038 (`--max-tokens`), which count padding; ours do
if asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from stoker.errors import BadJob
from stoker.jobs.optimizers import SGD, Adam, AdamW, Optimizer
from stoker.jobs.sampling import as_array

if TYPE_CHECKING:
    from stoker.jobs.job import Job


AUTO_BASE = 64
"""The batch for which the learning rate is taken to be stated where `batch="auto"` says nothing else [samples]."""

_EXPONENTS: dict[type[Optimizer], float] = {SGD: 1.0, Adam: 0.5, AdamW: 0.5}
"""How the best learning rate grows with the batch far below the noise scale: as its power of this.

SGD: Goyal et al. 2017, https://arxiv.org/abs/1706.02677. Adam: Malladi et al. 2022, https://arxiv.org/abs/2205.10287.
"""


class AutoBatch(int):
    """A batch that is still to be chosen. As a number it is the batch for which the learning rate is stated."""

    most: int | None
    """The largest batch that may be chosen; None: what the data allow."""

    def __new__(cls, base: int = AUTO_BASE, most: int | None = None) -> Self:
        """A batch of `base` samples that may grow up to `most`."""
        made = super().__new__(cls, base)
        made.most = most
        return made

    def __repr__(self) -> str:
        """As it is written."""
        return f"stoker.auto(base={int(self)}{'' if self.most is None else f', most={self.most}'})"


def auto(*, base: int = AUTO_BASE, most: int | None = None) -> AutoBatch:
    """A batch chosen by the gradient's noise scale: `base` times a power of two.

    Args:
        base: the batch for which the optimiser's learning rate is stated [samples]; the least that is chosen.
        most: the largest batch to choose [samples].

    Raises:
        BadJob: `base` is no positive whole number, or `most` is below it.
    """
    if not (_is_count(base) and (most is None or (_is_count(most) and most >= base))):
        raise BadJob(
            f"stoker.auto(base={base!r}, most={most!r}): wanted whole numbers of samples, 1 <= base <= most",
            remedy="Say for which batch the learning rate was chosen: batch=stoker.auto(base=64).",
        )
    return AutoBatch(base, most)


def scalable(optimizer: object) -> tuple[Optimizer, float]:
    """The optimiser, and the power of the batch with which its learning rate grows far below the noise scale.

    Raises:
        BadJob: that is not known of it.
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
    """What the learning rate is multiplied by when the batch goes from `base` to `batch` samples.

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
    """The same optimiser with its learning rate, and those of its groups, multiplied by `factor`; nothing else."""
    groups = {
        pattern: {name: value * factor if name == "lr" else value for name, value in settings.items()}
        for pattern, settings in optimizer.groups.items()
    }
    return dataclasses.replace(optimizer, lr=optimizer.lr * factor, groups=groups)


def largest_batch(base: int, noise_scale: float, limit: int) -> int:
    """`base` times the largest power of two that is neither above the noise scale nor above `limit`; at least `base`.

    >>> largest_batch(64, 700.0, 10_000), largest_batch(64, 700.0, 300), largest_batch(64, 10.0, 300)
    (512, 256, 64)
    """
    batch = base
    while 2 * batch <= min(noise_scale, limit):
        batch *= 2
    return batch


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class TokenBatch(int):
    """A batch of at most `num_tokens` tokens.

    As a number it is the most samples that a batch has: no more than tokens, until the lengths of the data are known.
    """

    num_tokens: int
    is_padded: bool
    """Whether padding counts: samples times the longest of them."""
    length_of: Any
    """The length of a sample, as `stoker.lengths.bucketed` takes it."""

    def __new__(cls, num_samples: int, num_tokens: int, length_of: Any = None, *, is_padded: bool = False) -> Self:
        """A batch of `num_tokens` tokens, which are at most `num_samples` samples."""
        made = super().__new__(cls, num_samples)
        made.num_tokens, made.length_of, made.is_padded = num_tokens, length_of, is_padded
        return made

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]  # an int's are one number
        """What a copy is made with, before its attributes."""
        return int(self), self.num_tokens

    def __repr__(self) -> str:
        """As it is written."""
        return f"stoker.tokens({self.num_tokens}{', padded=True' if self.is_padded else ''})"

    def __str__(self) -> str:
        """The number."""
        return str(int(self))

    def of(self, num_samples: int) -> TokenBatch:
        """The same where no batch has more than `num_samples` samples."""
        return TokenBatch(num_samples, self.num_tokens, self.length_of, is_padded=self.is_padded)


def tokens(num_tokens: int, *, length_of: Any = None, padded: bool = False) -> TokenBatch:
    """A batch of as many whole samples as have at most `num_tokens` tokens together.

    Every sample comes once an epoch, an epoch has as many updates as any other, and a sample is never split. With
    `lengths=stoker.lengths.bucketed()` samples of like length come together; with `packed(into)` a batch is as many
    rows as hold that many tokens.

    Args:
        num_tokens: the most tokens in a batch.
        length_of: a function of a sample, or one length for each sample of `data` (default: the first dimension of its
            first entry); of bucketed and packed samples `lengths` says it. A function reads every sample once when
            the job is made ready.
        padded: count padding too: samples times the longest of them. What a batch then takes of the device is bounded.

    Raises:
        BadJob: `num_tokens` is no positive whole number.
    """
    given: object = num_tokens
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise BadJob(f"stoker.tokens({num_tokens!r}): wanted a whole number of tokens, 1 or more",
                     remedy="Say how many an update averages over: batch=stoker.tokens(16_384).")  # fmt: skip
    if length_of is not None and not callable(length_of):
        length_of = as_array(length_of, "lengths")
    return TokenBatch(num_tokens, num_tokens, length_of, is_padded=padded)


def token_checks(job: Job) -> Iterator[tuple[str, bool, str]]:
    """What goes with batches that have different numbers of samples: a field, if it can be meant, what is wrong."""
    batch: object = job.batch
    if not isinstance(batch, TokenBatch):
        return
    why = f"batch={batch!r} makes batches of different numbers of samples, which does not go with"
    for name in ("sampling", "step", "sync", "coupling_group"):
        yield name, getattr(job, name) is None, f"{why} {name}: give the batch as a number"
    yield "loss_scope", job.loss_scope == "sample", f"{why} a loss over the whole batch: give the batch as a number"
    is_said_twice = job.lengths is not None and batch.length_of is not None
    yield "batch", not is_said_twice, "lengths=… says how long samples are: leave out length_of of stoker.tokens(…)"
