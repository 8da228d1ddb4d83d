"""Processes of one run that start, meet and regroup after a loss; all but `state_broadcast` know nothing of training.

`Supervisor` (or a launcher such as torchrun) starts the processes, `Membership` decides who belongs to a generation,
and each process takes part as an `ElasticWorker`: its `Rendezvous` is its place in a generation.
"""
