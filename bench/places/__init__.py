"""Runs at places elsewhere: what they survive, and what starting them costs."""
