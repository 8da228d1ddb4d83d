"""How Stoker's process is told of a plan, without importing Stoker."""

PLAN_FILE = "STOKER_BENCH_PLAN"
"""Environment variable with the plan's file, where the planner is not to be asked."""
