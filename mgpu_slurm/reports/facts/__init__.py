"""Gather the facts of a report: what runs and sweeps came to."""
