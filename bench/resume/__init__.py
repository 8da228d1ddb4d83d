"""Exact resuming under SIGKILL."""
