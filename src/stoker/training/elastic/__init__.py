"""Processes of one run: started, watched, and organised in generations. Knows nothing of jobs and steps.

A `Supervisor` starts workers, which are each a `Member`; a generation is what they are told in a `Meeting`.
"""

from __future__ import annotations
