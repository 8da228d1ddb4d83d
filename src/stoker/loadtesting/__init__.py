"""Asking a service at a given rate, and finding the highest that holds a latency objective."""
