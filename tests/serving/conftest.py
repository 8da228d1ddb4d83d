"""What is here and is no test."""

from __future__ import annotations

collect_ignore = ["kserve_asking.py"]  # a script for an interpreter that has KServe
