"""Job functions to run as they are and to copy: plain Python on the public API of mgpu_slurm."""
