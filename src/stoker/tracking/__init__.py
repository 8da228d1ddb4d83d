"""Runs seen elsewhere: TensorBoard, MLflow, Weights & Biases, a CSV file.

A tracker is fed from the run's own log of events, up to a place that is kept beside it. So a tracker that is down costs
a run nothing, one that is back gets what it missed, and a run that is over can be sent by the same code.
"""
