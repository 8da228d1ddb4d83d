"""Coverage-guided fuzzing of everything that reads what others wrote.

    python -m bench.fuzz [--minutes 1] [--target tar]… [--save]

Each target of `bench.fuzz.targets` runs in a process of its own under atheris (libFuzzer), from the seeds in
`corpus/TARGET` and the inputs in `found/TARGET` that once ended otherwise than they should. Stoker's own Python and the
standard library's `tarfile` are instrumented; what is written in C (json, csv, pyarrow, zlib, PIL, safetensors) is not,
so that its branches guide nothing. An input that raises, takes more than 20 s, or more than 3 GiB is written to
build/fuzz/TARGET and ends its target; the command then ends with 1. To keep it as a test, mend its cause and copy it
to `found/TARGET`. `--save` writes bench/results/fuzz_DATE.json.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.fuzz.targets import seeds_of, targets
from bench.train.results import document, save

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUTPUT = ROOT / "build" / "fuzz"
SLOWEST_S, MOST_MIB, LONGEST_BYTES = 20, 3072, 16384
_PROGRESS = re.compile(r"^#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+)(?: corp: (\d+)/)?", re.MULTILINE)
_WORDS = re.compile(rb'"([\w.-]{2,30})"')


def main() -> None:
    """Run the targets one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="of each target")
    parser.add_argument("--target", action="append", choices=sorted(targets()), help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="targets at the same time")
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    names = chosen.target or sorted(targets())
    with ThreadPoolExecutor(chosen.jobs) as pool:
        results = dict(zip(names, pool.map(lambda name: _run(name, chosen.minutes), names), strict=True))
    if chosen.save:
        packages = ("atheris", "numpy", "torch", "safetensors", "pyarrow", "uvicorn")
        content = document(
            "Coverage-guided fuzzing of readers: executions, edges covered, and inputs that ended otherwise",
            f"python -m bench.fuzz --minutes {chosen.minutes:g} --jobs {chosen.jobs} --save",
            {"python": sys.version.split()[0]} | {name: metadata.version(name) for name in packages},
        )
        save(ROOT / "bench" / "results" / f"fuzz_{datetime.now(UTC).date()}.json", content | {"targets": results})
    if failed := [name for name, result in results.items() if result["exit"] or result["findings"]]:
        sys.exit(f"{', '.join(failed)}: not clean; inputs and what was raised are in {OUTPUT}")


def _run(name: str, minutes: float) -> dict[str, Any]:
    """One target: what it executed and covered, and which inputs it found."""
    place = OUTPUT / name
    shutil.rmtree(place, ignore_errors=True)
    (place / "corpus").mkdir(parents=True)
    seeds = [folder for folder in (HERE / "corpus" / name, HERE / "found" / name) if folder.is_dir()]
    words = {word.decode() for path in seeds_of(name) for word in _WORDS.findall(path.read_bytes())}
    (place / "words.dict").write_text("".join(f'"{word}"\n' for word in sorted(words | {"null"})))
    began = time.monotonic()
    with (place / "log.txt").open("wb") as log:
        done = subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "bench.fuzz.child",
                name,
                str(place / "corpus"),
                *map(str, seeds),
                f"-max_total_time={round(60 * minutes)}",
                f"-max_len={LONGEST_BYTES}",
                f"-timeout={SLOWEST_S}",
                f"-rss_limit_mb={MOST_MIB}",
                f"-artifact_prefix={place}/",
                f"-dict={place / 'words.dict'}",
                "-print_final_stats=1",
                "-seed=1",
            ],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    text = (place / "log.txt").read_text(errors="replace")
    progress = _PROGRESS.findall(text)
    executions = re.search(r"stat::number_of_executed_units: (\d+)", text)
    findings = sorted(
        path.name for path in place.iterdir() if path.name.startswith(("crash-", "timeout-", "oom-", "leak-"))
    )
    result = {
        "seconds": round(time.monotonic() - began, 1),
        "executions": int(executions[1] if executions else progress[-1][0] if progress else 0),
        "edges_covered": int(progress[-1][1]) if progress else 0,
        "features": int(progress[-1][2]) if progress else 0,
        "seeds": len(seeds_of(name)),
        "inputs_kept": sum(1 for _ in (place / "corpus").iterdir()),
        "exit": done.returncode,
        "findings": findings,
    }
    print(
        f"{name:20} {result['executions']:>9,} executions, {result['edges_covered']:>6,} edges, "
        f"{result['seconds']:.0f} s, {len(findings)} findings, exit {done.returncode}",
        flush=True,
    )
    if done.returncode:
        lines = [line for line in text.splitlines() if not line.startswith(("INFO: ", "WARNING: "))]
        print("\n".join(lines[-30:]), flush=True)
    return result


if __name__ == "__main__":
    main()
