"""Forecasts against what was measured, and choices against what could have been chosen."""
