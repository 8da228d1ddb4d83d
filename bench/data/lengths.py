"""How much is padded, and what orders cost: real documents plain, bucketed and packed, and a million samples in order.

    python -m bench.data.lengths [--into 512] [--batch 32] [--rounds 5]

Documents are the functions of Python's standard library as bytes, those of at most `--into`. Counted is the share of an
epoch's tokens that is padding, and rows; these are the same on any machine. CPU time is of one thread: an epoch of a
million samples in each order, asked for batch by batch. Printed and written to bench/results/.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import sysconfig
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.devices.cpu import attached_cpu
from stoker.jobs.fields import Fields
from stoker.jobs.lengths import packed
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.lengths import BucketedOrder, PackedSamples, rows_of_lengths
from stoker.loading.order import EpochOrder, Indices, Order
from stoker.loading.sampling import BalancedSamples, Labels, StratifiedOrder, WeightedSamples

MANY, ASKED = 1_000_000, 256


def documents(longest: int) -> Iterator[int]:
    """The length [bytes] of each function in the standard library's own modules that is no longer than `longest`."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = len((ast.get_source_segment(text, node) or "").encode())
                if 0 < length <= longest:
                    yield length


def padded_share(lengths: Indices, order: Order, batch: int) -> float:
    """The share of an epoch that is padding, where each batch is padded to its longest sample."""
    found = lengths[order.indices(0, 0, len(lengths))]
    batches = np.split(found, range(batch, len(found), batch))
    return 1 - float(found.sum()) / sum(int(one.max()) * len(one) for one in batches)


def shares(lengths: Indices, into: int, batch: int) -> dict[str, Any]:
    """Padding plain, bucketed in windows of several sizes, and packed."""
    found: dict[str, Any] = {"plain": {"padding": padded_share(lengths, EpochOrder(len(lengths), 0), batch)}}
    for window in (5, 20, 50, 200):
        order = BucketedOrder(lengths, batch, window, 0)
        found[f"bucketed, window {window}"] = {"padding": padded_share(lengths, order, batch)}
    rows = PackedSamples(as_samples(range(len(lengths)), what="data"), lengths, packed(into), Fields(), 0)
    found[f"packed into {into}"] = {
        "padding": 1 - rows.fill,
        "rows": len(rows),
        "fewest_rows": int(np.ceil(lengths.sum() / into)),
    }
    return found


def walked_s(order: Order, rounds: int) -> float:
    """The median CPU time of an epoch of a million samples, in batches [s]; a new epoch each time."""
    spent = []
    for epoch in range(rounds):
        started = time.thread_time()
        for start in range(0, MANY, ASKED):
            order.indices(epoch, start, min(start + ASKED, MANY))
        spent.append(time.thread_time() - started)
    return statistics.median(spent)


def costs(rounds: int) -> dict[str, float]:
    """CPU seconds of a million samples in each order, ten classes, lengths of 1 to 512."""
    draws = np.random.default_rng(0)
    classes, lengths = draws.integers(0, 10, MANY), draws.integers(1, 513, MANY)
    labels, numbers = Labels(classes, tuple(range(10))), as_samples(range(MANY), what="data")
    orders: dict[str, Order] = {
        "plain": EpochOrder(MANY, 0),
        "bucketed, window 50": BucketedOrder(lengths, ASKED, 50, 0),
        "stratified": StratifiedOrder(labels, 0),
        "balanced": _Draws(BalancedSamples(numbers, labels, None, 0)),
        "weighted": _Draws(WeightedSamples(numbers, draws.random(MANY), None, 0)),
    }
    downwards, started = np.sort(lengths)[::-1], time.thread_time()
    rows_of_lengths(downwards, 512)
    laid_out_s = time.thread_time() - started
    walked = {name: round(walked_s(order, rounds), 3) for name, order in orders.items()}
    return walked | {"packed into 512: laid out once": round(laid_out_s, 3)}


class _Draws:
    """Draws as an order: those at positions of the epoch's own order."""

    def __init__(self, drawn: Any) -> None:
        self._drawn, self._order = drawn, EpochOrder(MANY, 0)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        found: Indices = self._drawn.drawn(self._order.indices(epoch, start, stop), epoch)
        return found


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lengths = np.array(list(documents(arguments.into)))
    result = {
        "what": "padding of real documents plain, bucketed and packed; CPU time of a million samples in each order",
        "command": f"python -m bench.data.lengths --into {arguments.into} --batch {arguments.batch} "
        f"--rounds {arguments.rounds}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{attached_cpu().model}, torch {torch.__version__}, numpy {np.__version__}, 1 thread",
        "load": os.getloadavg()[0],
        "documents": {
            "number": len(lengths),
            "bytes": int(lengths.sum()),
            "median": int(np.median(lengths)),
            "shortest": int(lengths.min()),
            "longest": int(lengths.max()),
        },
        "shares": shares(lengths, arguments.into, arguments.batch),
        "cpu_s_of_a_million_samples": costs(arguments.rounds),
    }
    text = json.dumps(result, indent=2)
    print(text)
    results = Path(__file__).parents[1] / "results"
    (results / f"data_lengths_{result['date']}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
