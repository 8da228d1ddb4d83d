"""Whole runs of 20 to 60 s, timed from the command to the exit of the process: Stoker, Lightning, a plain loop."""
