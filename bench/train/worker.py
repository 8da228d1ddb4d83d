"""One contender in a process of its own, started by bench.train.driving.

python -m bench.train.worker CONTENDER CASE quick|whole FOLDER STARTED COMMANDS ANSWERS

The last two are file descriptors of pipes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.train.cases import CASES, quick
from bench.train.contenders import CONTENDERS
from bench.train.gpu_cases import GPU_CASES, GPU_CONTENDERS
from bench.train.material import read
from bench.train.pacing import Pacer


def main(arguments: list[str]) -> None:
    """Train until told to stop."""
    contender, case_name, size, folder, started, commands, answers = arguments
    case = (CASES | GPU_CASES)[case_name]
    if size == "quick":
        case = quick(case)
    pacer = Pacer(os.fdopen(int(commands)), os.fdopen(int(answers), "w"), float(started))
    where = GPU_CONTENDERS if case_name in GPU_CASES else CONTENDERS
    where[contender].run(read(case, Path(folder)), pacer)


if __name__ == "__main__":
    main(sys.argv[1:])
