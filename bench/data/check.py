"""What `stoker data check` finds: of planted faults all, and in Fashion-MNIST; how fast, and in how much memory.

    python -m bench.data.check [--fashion DIR] [--rows 200000] [--seeds 3]

Planted: data sets of every kind (bench/data/planted.py), several seeds each: faults missed, and false alarms. Fashion-
MNIST: counts, and the near duplicates between test and training against all 600 million pairs compared one by one; a
sheet of pictures of all of them is written next to the results, to be looked at. Memory: an IDX file of so many small
pictures of noise. Seconds are of the clock and of the CPU (all processes): on a busy machine only the latter mean much.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import struct
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from bench.data.planted import PLANTERS, false_alarms, is_found
from stoker.devices import attached_cpu
from stoker.inspecting import CheckOptions, check
from stoker.inspecting.data_check import find
from stoker.inspecting.image_signatures import ImageSurvey, survey
from stoker.inspecting.near_duplicates import NearPair, correlation, near_pairs, standing_out, usual_distances
from stoker.records.data_check import Finding

RESULTS = Path(__file__).parents[1] / "results"
FASHION = Path("/usr/share/datasets/fashion-mnist")


def quietly(_what: str, _done: int, _total: int) -> None:
    """Tells nobody."""


def planted(seeds: int) -> dict[str, Any]:
    """Of each kind of data set: how many faults were planted and missed, and the false alarms."""
    found: dict[str, Any] = {}
    for kind, plant in PLANTERS.items():
        counts: dict[str, Any] = {"planted": 0, "missed": [], "false_alarms": [], "samples": 0}
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as name:
                faults = plant(Path(name, kind), seed=seed)
                checked = check(Path(name, kind), (), CheckOptions(), workers=1, tell=quietly)
            counts["planted"] += len(faults)
            counts["samples"] += sum(split.num_samples for split in checked.splits)
            counts["missed"] += [f"{one.fault} {one.how}" for one in faults if not is_found(one, checked.findings)]
            alarms = false_alarms(faults, checked.findings)
            counts["false_alarms"] += [f"{one.fault} {one.id or one.where} {one.detail}" for one in alarms]
        found[kind] = counts
        missed, alarms_in_all = len(counts["missed"]), len(counts["false_alarms"])
        print(f"  {kind}: {counts['planted']} planted, {missed} missed, {alarms_in_all} false alarms")
    return found


def fashion(folder: Path, sheet: Path) -> dict[str, Any]:
    """What is in Fashion-MNIST, and whether hashing loses near duplicates between test and training."""
    workers = attached_cpu().cores
    began, spent = time.monotonic(), cpu_seconds()
    checked = check(folder, (), CheckOptions(), workers=workers, tell=quietly)
    took, cpu = time.monotonic() - began, cpu_seconds() - spent
    counts: dict[str, int] = {}
    for finding in checked.findings:
        counts[f"{finding.fault} in {finding.where}"] = counts.get(f"{finding.fault} in {finding.where}", 0) + 1
    leaks = [one for one in checked.findings if one.fault == "near-leak"]
    draw_sheet(leaks, checked.picture, sheet)
    seen = survey(found_units(folder), workers, quietly)
    least = CheckOptions().least_correlation
    by_hash = {(one.first, one.second) for one in near_pairs(seen, least, quietly).pairs if crosses(seen, one)}
    one_by_one = {(one.first, one.second) for one in all_pairs(seen, least)}
    print(f"  {counts}; between splits {len(by_hash)} pairs, one by one {len(one_by_one)}")
    return {
        "samples": {split.name: split.num_samples for split in checked.splits},
        "found": counts,
        "notes": checked.notes,
        "seconds": round(took, 1),
        "cpu_seconds": round(cpu, 1),
        "pairs_between_splits": {
            "by_hash": len(by_hash),
            "one_by_one": len(one_by_one),
            "missed_by_hash": len(one_by_one - by_hash),
            "only_by_hash": len(by_hash - one_by_one),
        },
        "near_leaks": [{"train": one.id, "test": one.related[0], "r": one.measure} for one in leaks],
    }


def found_units(folder: Path) -> tuple[Any, ...]:
    """The units of a folder of IDX files."""
    found = find(folder)
    if not hasattr(found, "units"):
        raise SystemExit(f"{folder} has no images")
    units: tuple[Any, ...] = found.units
    return units


def crosses(seen: ImageSurvey, pair: NearPair) -> bool:
    """Whether a pair is of two splits."""
    return bool(seen.splits[pair.first] != seen.splits[pair.second])


def all_pairs(seen: ImageSurvey, least: float) -> list[NearPair]:
    """Near duplicates between the splits, without hashes: every pair is asked whether it stands out."""
    rows = np.arange(len(seen))
    usual = usual_distances(seen.signatures, rows, quietly)
    train, test = (rows[seen.splits == seen.split_names.index(name)] for name in ("train", "test"))
    flat = seen.signatures["grey"].reshape(len(seen), -1).astype(np.float32)
    flat -= flat.mean(axis=1, keepdims=True)
    flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-6)
    pairs = []
    for start in range(0, len(test), 250):
        some = test[start : start + 250]
        second, first = np.nonzero(flat[some] @ flat[train].T >= 0.9)  # what stands out is closer than that
        left, right = train[first], some[second]
        kept = standing_out(seen.signatures, usual, left, right)
        for a, b in zip(left[kept].tolist(), right[kept].tolist(), strict=True):
            r = correlation(seen.picture(a), seen.picture(b))
            if r >= least:
                pairs.append(NearPair(a, b, r))
    return pairs


def draw_sheet(leaks: list[Finding], picture: Any, path: Path, across: int = 8) -> None:
    """Each pair side by side, its number and r below: what was found, to be looked at."""
    size, gap = 84, 10
    wide, high = 2 * size + 2 * gap, size + 26
    sheet = Image.new("RGB", (across * wide + gap, -(-len(leaks) // across) * high + gap), "white")
    pen = ImageDraw.Draw(sheet)
    for number, one in enumerate(leaks):
        left, top = gap + number % across * wide, gap + number // across * high
        for place, name in enumerate((one.id, one.related[0])):
            sheet.paste(picture(name).resize((size, size), Image.Resampling.NEAREST), (left + place * (size + 2), top))
        pen.text((left, top + size + 2), f"{number + 1}: r = {one.measure:.4f}", fill="black")
    sheet.save(path, optimize=True)


def memory(rows: int) -> dict[str, Any]:
    """Peak memory [bytes] of the process that holds everything, for a small set and for one of `rows` pictures."""
    found = {}
    for count in (1000, rows):
        with tempfile.TemporaryDirectory() as name:
            write_noise(Path(name), count)
            script = (
                "import sys, time, resource\nfrom pathlib import Path\n"
                "from stoker.inspecting import check, CheckOptions\n"
                "began = time.monotonic()\n"
                "if __name__ == '__main__':\n"
                "    check(Path(sys.argv[1]), (), CheckOptions(), workers=1, tell=lambda *_: None)\n"
                "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
                # ru_maxrss would count the process that this one was forked from
                "    status = dict(line.split(':') for line in open('/proc/self/status'))\n"
                "    print(int(status['VmHWM'].split()[0]) * 1024, used.ru_utime + used.ru_stime,\n"
                "          time.monotonic() - began)\n"
            )
            done = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, check=True)
        peak, cpu, took = (float(word) for word in done.stdout.split())
        found[str(count)] = {"peak_bytes": int(peak), "cpu_seconds": round(cpu, 1), "seconds": round(took, 1)}
        print(f"  {count:,} pictures: {peak / 2**20:,.0f} MiB, {cpu:.1f} CPU-seconds")
    return found


def write_noise(folder: Path, rows: int) -> None:
    """IDX files of soft noise, 16 × 16, in ten classes."""
    draw = np.random.default_rng(0)
    with (folder / "train-images-idx3-ubyte").open("wb") as file:
        file.write(struct.pack(">HBB3I", 0, 8, 3, rows, 16, 16))
        for start in range(0, rows, 10_000):
            coarse = draw.integers(0, 256, (min(10_000, rows - start), 8, 8), np.uint8)
            file.write(coarse.repeat(2, axis=1).repeat(2, axis=2).tobytes())
    labels = (np.arange(rows) % 10).astype(np.uint8)
    (folder / "train-labels-idx1-ubyte").write_bytes(struct.pack(">HBB1I", 0, 8, 1, rows) + labels.tobytes())


def cpu_seconds() -> float:
    """CPU time of this process and of those it waited for [s]."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fashion", type=Path, default=FASHION)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, default=3)
    wanted = parser.parse_args()
    date = datetime.now(UTC).date().isoformat()
    print("planted", flush=True)
    result: dict[str, Any] = {
        "what": "faults found of those planted, Fashion-MNIST, memory",
        "date": date,
        "command": f"python -m bench.data.check --rows {wanted.rows} --seeds {wanted.seeds}",
        "hardware": f"{attached_cpu().model}, {attached_cpu().cores} cores",
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in ("pillow", "pyarrow", "numpy")},
        "planted": planted(wanted.seeds),
    }
    if wanted.fashion.is_dir():
        print("Fashion-MNIST", flush=True)
        result["fashion_mnist"] = fashion(wanted.fashion, RESULTS / f"data_check_near_leaks_{date}.png")
    print("memory", flush=True)
    result["memory"] = memory(wanted.rows)
    path = RESULTS / f"data_check_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
