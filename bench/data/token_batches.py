"""How full batches stated in tokens are, how much they pad, and what their order costs.

    python -m bench.data.token_batches [--tokens 6400] [--longest 512] [--rounds 5]

Documents are the functions of Python's standard library as bytes, as in `bench.data.lengths`. Counted are updates, and
of an epoch's batches the share of their tokens that is used (`fill`) and the share of the padded ones that is padding;
against batches of a fixed number of samples, as many as have that many tokens on average. These are the same on any
machine. CPU time is of one thread: a million samples of 1 to 512 tokens laid out once, and the order of an epoch of
them. Printed and written to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.data.lengths import documents
from stoker.devices.cpu import attached_cpu
from stoker.loading.lengths import BucketedOrder
from stoker.loading.order import EpochOrder, Indices
from stoker.loading.token_batches import TokenBudget, TokenLayout

MANY, TOKENS_OF_MANY = 1_000_000, 16_384


def counted(lengths: Indices, batches: list[Indices], num_tokens: int, *, is_padded: bool = False) -> dict[str, Any]:
    """What batches of samples come to, against `num_tokens` tokens, padding counted or not."""
    own = np.array([int(lengths[one].sum()) for one in batches])
    padded = np.array([len(one) * int(lengths[one].max()) for one in batches])
    taken = padded if is_padded else own
    return {
        "updates": len(batches),
        "fill": round(float(taken.mean()) / num_tokens, 4),
        "padding": round(1 - float(own.sum()) / float(padded.sum()), 4),
        "tokens": [int(own.min()), int(own.max())],
        "padded_tokens_at_most": int(padded.max()),
        "samples": [min(map(len, batches)), max(map(len, batches))],
    }


def shares(lengths: Indices, num_tokens: int) -> dict[str, Any]:
    """Fixed numbers of samples and of tokens, in a keyed order and bucketed."""
    size, found = len(lengths), dict[str, Any]()
    batch = round(num_tokens / float(lengths.mean()))
    for name, order in {"plain": EpochOrder(size, 0), "bucketed": BucketedOrder(lengths, batch, 50, 0)}.items():
        batches = np.split(order.indices(0, 0, size), range(batch, size, batch))
        found[f"{batch} samples, {name}"] = counted(lengths, batches, num_tokens)
    for cut in (
        TokenBudget(num_tokens),
        TokenBudget(num_tokens, window=50),
        TokenBudget(num_tokens, is_padded=True, window=50),
    ):
        layout = TokenLayout(lengths, cut, seed=0)
        batches = np.split(layout.samples(0), layout.cursors(0)[1:-1])
        words = f"tokens({num_tokens}{', padded=True' if cut.is_padded else ''})"
        named = f"{words}, {'plain' if cut.window is None else 'bucketed'}"
        found[named] = counted(lengths, batches, num_tokens, is_padded=cut.is_padded)
    return found


def costs(rounds: int) -> dict[str, float]:
    """CPU seconds of a million samples: laid out, and an epoch's order."""
    lengths, laid_out, epochs = np.random.default_rng(0).integers(1, 513, MANY), [], []
    for _ in range(rounds):
        started = time.thread_time()
        layout = TokenLayout(lengths, TokenBudget(TOKENS_OF_MANY, window=50), seed=0)
        laid_out.append(time.thread_time() - started)
        started = time.thread_time()
        layout.samples(1)
        epochs.append(time.thread_time() - started)
    return {"laid out once": round(statistics.median(laid_out), 3), "each epoch": round(statistics.median(epochs), 3)}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6400)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    lengths = np.array(list(documents(arguments.longest)))
    result = {
        "what": "batches stated in tokens of real documents: fill and padding; CPU time of a million samples",
        "command": f"python -m bench.data.token_batches --tokens {arguments.tokens} --longest {arguments.longest} "
        f"--rounds {arguments.rounds}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{attached_cpu().model}, torch {torch.__version__}, numpy {np.__version__}, 1 thread",
        "load": os.getloadavg()[0],
        "documents": {"number": len(lengths), "bytes": int(lengths.sum()), "longest": int(lengths.max())},
        "batches": shares(lengths, arguments.tokens),
        "cpu_s_of_a_million_samples": costs(arguments.rounds),
    }
    text = json.dumps(result, indent=2)
    print(text)
    results = Path(__file__).parents[1] / "results"
    (results / f"data_token_batches_{result['date']}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
