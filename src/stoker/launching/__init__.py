"""Processes of one run: started, watched, and organised in generations. Knows nothing of jobs and steps.

A `Supervisor` starts workers, which are each a `Member`; a generation is what they are told in a `Meeting`.
"""

from stoker.launching.meeting import Dismissed, Meeting
from stoker.launching.member import Member
from stoker.launching.supervisor import INTERRUPTED, Loss, Supervisor

__all__ = ["INTERRUPTED", "Dismissed", "Loss", "Meeting", "Member", "Supervisor"]
