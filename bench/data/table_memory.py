"""What reading a large table takes of memory: a block of it, whatever its size.

    python -m bench.data.table_memory [--rows 1000000 4000000] [--features 16]

For each number of rows a Parquet file is written (in groups of 100,000), then read by `stoker.data.parquet` in a
process of its own, with an empty cache: once through, then 200 batches of 256 rows at random. What counts is the most
memory that process held of its own (anonymous, without pages of files that are mapped), over what it held before it
read. The result is printed and written to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import stoker

_GROUP_ROWS = 100_000
_BATCHES, _BATCH = 200, 256


def write(path: Path, num_rows: int, num_features: int) -> None:
    """A Parquet file of random numbers with a class each."""
    generator = np.random.default_rng(0)
    names = [f"x{at}" for at in range(num_features)]
    schema = pa.schema([*((name, pa.float32()) for name in names), ("kind", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, _GROUP_ROWS):
            count = min(_GROUP_ROWS, num_rows - start)
            columns = [pa.array(generator.random(count, np.float32)) for _ in names]
            kinds = pa.array(np.array(["a", "b", "c"])[generator.integers(0, 3, count)])
            writer.write_table(pa.Table.from_arrays([*columns, kinds], schema=schema))


def anonymous_bytes() -> int:
    """What this process holds of its own [bytes], as Linux counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon: this needs Linux")


class Peak:
    """The most memory held since it was started, looked at every 10 ms."""

    def __init__(self) -> None:
        self.num_bytes = anonymous_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.01):
            self.num_bytes = max(self.num_bytes, anonymous_bytes())

    def stop(self) -> int:
        """The most [bytes]."""
        self._is_over.set()
        self._thread.join()
        return self.num_bytes


def read(path: Path) -> dict[str, float]:
    """Read the table here; memory over the start, and seconds."""
    import pyarrow.csv  # noqa: F401, PLC0415 - libraries count as there before
    import torch  # noqa: PLC0415 - likewise

    before, peak, started = anonymous_bytes(), Peak(), time.perf_counter()
    source = stoker.data.parquet(path, target="kind")
    num_rows = len(source)
    read_s, during = time.perf_counter() - started, peak.stop() - before
    places = np.random.default_rng(1)
    peak, started = Peak(), time.perf_counter()
    for _ in range(_BATCHES):
        source.rows(places.integers(0, num_rows, _BATCH))
    fetch_s = time.perf_counter() - started
    return {
        "rows": num_rows,
        "read_s": read_s,
        "extra_bytes_while_reading": during,
        "fetch_s": fetch_s,
        "extra_bytes_while_fetching": peak.stop() - before,
        "torch_threads": torch.get_num_threads(),
    }


def measured(num_rows: int, num_features: int) -> dict[str, float]:
    """One size, in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "t.parquet"
        write(path, num_rows, num_features)
        done = subprocess.run(
            [sys.executable, "-m", "bench.data.table_memory", "--read", str(path)],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"STOKER_CACHE": str(Path(name) / "cache")},
        )
        found: dict[str, float] = json.loads(done.stdout)
        return {**found, "file_bytes": path.stat().st_size, "decoded_bytes": num_rows * (num_features * 4 + 16)}


def main() -> int:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1_000_000, 4_000_000])
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--read", type=Path)
    arguments = parser.parse_args()
    if arguments.read is not None:
        print(json.dumps(read(arguments.read)))
        return 0
    load = os.getloadavg()[0]
    sizes = [measured(rows, arguments.features) for rows in arguments.rows]
    date = datetime.now(UTC).date().isoformat()
    result = {
        "what": "memory that reading a Parquet file takes, over what the process held before [bytes]",
        "command": f"python -m bench.data.table_memory --rows {' '.join(map(str, arguments.rows))} "
        f"--features {arguments.features}",
        "date": date,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_before": load,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "numpy", "pyarrow", "stoker")},
        "sizes": sizes,
    }
    path = Path(__file__).parents[1] / "results" / f"table_memory_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for size in sizes:
        print(
            f"{size['rows']:,.0f} rows, {size['decoded_bytes'] / 1e6:,.0f} MB: "
            f"{size['extra_bytes_while_reading'] / 1e6:,.0f} MB more while reading ({size['read_s']:.1f} s), "
            f"{size['extra_bytes_while_fetching'] / 1e6:,.0f} MB while fetching"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
