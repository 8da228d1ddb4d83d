"""Tuning: which settings of a job are best, by trials that are real runs. It is handed what runs a trial."""

from stoker.tuning.messages import Ending, Judge, Reading, Request, RunTrial, Slot
from stoker.tuning.space import Space, in_words, parse_space

__all__ = ["Ending", "Judge", "Reading", "Request", "RunTrial", "Slot", "Space", "in_words", "parse_space"]
