"""CPU seconds of what stands before a settled plan: checks, coupling probe, memory traces, for the eight kinds.

    python -m bench.start.probe [--kinds unet,gru] [--rounds 3] [--against SRC] [--threads 2]

Each time is of a process of its own, user and system. `SRC` is the `src` folder of another revision, measured in turns:

    git archive REVISION src | tar -x -C build/before

`imports` is up to `stoker.train` and PyTorch; `resolving` reads data and makes the outline; `usable` the checks before
the first update; `probe` the coupling; `trace` that of the whole batch in fp32, `trace_bf16` another in bf16 in the
same process; `compiler` says whether PyTorch's compiler was imported by then (0 or 1).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_COLUMNS = ("imports", "resolving", "usable", "probe", "trace", "trace_bf16", "compiler")


def measured(name: str, folder: Path, threads: int) -> dict[str, float]:
    """CPU seconds of each stage in this process, which has imported nothing yet."""
    spent: dict[str, float] = {}
    marks = [time.process_time()]

    def done(stage: str) -> None:
        spent[stage] = time.process_time() - marks[0]
        marks[0] = time.process_time()

    import torch  # noqa: PLC0415 - what is measured

    import stoker  # noqa: PLC0415
    from stoker.planning.job_traces import TraceBook  # noqa: PLC0415
    from stoker.planning.resolved_job import resolve_job  # noqa: PLC0415
    from stoker.records import TraceSettings  # noqa: PLC0415
    from stoker.stepping import coupling  # noqa: PLC0415
    from stoker.training import train  # noqa: F401, PLC0415

    done("imports")
    from bench.start.kinds import KINDS, WEIGHT_DECAY, read  # noqa: PLC0415 - imports PyTorch

    torch.set_num_threads(threads)
    kind = KINDS[name]
    job = stoker.Job(
        model=kind.model,
        data=read(kind, folder),
        loss=kind.loss,
        batch=kind.batch,
        name=kind.name,
        optimizer=stoker.AdamW(lr=kind.lr, weight_decay=WEIGHT_DECAY),
        until=stoker.updates(kind.updates),
    )
    prepared = resolve_job(job)
    done("resolving")
    if hasattr(coupling, "at_first"):
        coupling.at_first(prepared.job, prepared.data.train)
        done("usable")
    found = coupling.find_coupling(prepared.job, prepared.data.train)
    done("probe")
    book = TraceBook(prepared, found)
    for stage, precision in (("trace", "fp32"), ("trace_bf16", "bf16")):
        book(TraceSettings(target="cpu", capability="", micro_batch=kind.batch, precision=precision))
        done(stage)
    return spent | {"compiler": float("torch._dynamo" in sys.modules)}


def main() -> int:
    """Measure in turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measured(given.child[0], Path(given.child[1]), given.threads)))
        return 0
    from bench.start.kinds import KINDS, prepare  # noqa: PLC0415 - not in a process that is measured

    here = Path(__file__).resolve().parents[2] / "src"
    sources = {"here": here} | ({"against": given.against.resolve()} if given.against else {})
    print(f"{'kind':16}{'source':9}" + "".join(f"{column:>11}" for column in _COLUMNS))
    with tempfile.TemporaryDirectory(prefix="bench-probe-") as folder:
        prepare(Path(folder))
        for kind in given.kinds.split(",") if given.kinds else KINDS:
            spent: dict[str, list[dict[str, float]]] = {source: [] for source in sources}
            for _ in range(given.rounds):
                for source, path in sources.items():
                    environment = os.environ | {
                        "PYTHONPATH": str(path),
                        "STOKER_CACHE": tempfile.mkdtemp(dir=folder),
                        "HF_HUB_OFFLINE": "1",
                    }
                    command = [sys.executable, "-W", "ignore", "-m", "bench.start.probe", "--child", kind, folder]
                    command += ["--threads", str(given.threads)]
                    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                    spent[source].append(json.loads(done.stdout.splitlines()[-1]))
            for source, rounds in spent.items():
                medians = [statistics.median(times.get(column, 0.0) for times in rounds) for column in _COLUMNS]
                print(f"{kind:16}{source:9}" + "".join(f"{median:11.2f}" for median in medians), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
