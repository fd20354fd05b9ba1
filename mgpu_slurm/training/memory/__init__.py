"""Compute in as few parts as fit into memory, and recover when it runs out."""
