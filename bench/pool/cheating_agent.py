"""An agent that cheats, for demonstrations and tests: `python -m bench.pool.cheating_agent CHEAT …`.

Further arguments are those of `stoker pool offer`.
"""

from __future__ import annotations

import functools
import sys

import stoker.pool.agent
from bench.pool.cheats import CHEATS, cheating
from stoker.cli.main import main

if __name__ == "__main__":
    cheat, *arguments = sys.argv[1:]
    if cheat not in CHEATS:
        sys.exit(f"wanted one of {', '.join(CHEATS)}, got {cheat}")
    stoker.pool.agent.Agent = functools.partial(stoker.pool.agent.Agent, job_type=cheating(cheat))
    main(["pool", "offer", *arguments])
