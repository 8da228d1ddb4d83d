"""Checking data: what is found of what was planted, and in real sets."""
