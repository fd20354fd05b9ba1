"""Bring the ranks of a run together: rendezvous, messages, collectives, agreement on a step."""
