"""Trackers that follow a run: TensorBoard, MLflow, Weights & Biases, Trackio, Prometheus, a CSV file.

A tracker is fed from the run's own log of events, up to a place that is kept with the run. So a tracker that is down
costs a run nothing, one that is back gets what it missed, and a finished run can be sent by the same code.
"""
