"""Checkpoints: written while the training goes on, whole or not at all, read by as many ranks as there are."""
