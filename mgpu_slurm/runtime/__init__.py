"""Modules at the names that version 0.1 had for them: version 0.3 removes them.

A job that version 0.1 has queued starts `mgpu_slurm.runtime.batch`, which starts `mgpu_slurm.runtime.entry` or
`mgpu_slurm.sweeping.worker` on each rank; a function that it has pickled names `mgpu_slurm.runtime.run` in its
annotations.
"""
