"""Modules at the names that version 0.1 had for them (see `mgpu_slurm.runtime`)."""
