"""Agents of a pool that cheat, and what a pool costs."""
