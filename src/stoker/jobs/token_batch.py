"""`Job(batch=stoker.tokens(16_384))`: a batch stated in tokens, of as many whole samples as it has room for.

What: each update averages over samples whose tokens together come near a number and stay within it; the loss divides
by valid tokens, as always. Use when: lengths differ much, so that a fixed number of samples is now a large update, now
a small one. Costs: every length has to be known before the first update.
Does not combine with: streams, sampling, models whose samples influence one another (batch norm, contrastive losses),
a step of the job's own, `sync`.
Source: the batches of Ott et al. 2019, https://arxiv.org/abs/1904.01038 (`--max-tokens`), which count padding; ours do
if asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from stoker.errors import BadJob
from stoker.jobs.sampling import as_array

if TYPE_CHECKING:
    from stoker.jobs.job import Job


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
