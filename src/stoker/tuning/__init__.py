"""Tuning: which settings of a job are best, by trials that are real runs. It is handed what runs a trial."""
