"""Load tests of a service: measure at a given rate, and find the highest rate that holds a latency objective."""
