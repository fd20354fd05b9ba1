"""Simulated sweeps: how good the best trial is after a part of the budget, by sampler and scheduler."""
