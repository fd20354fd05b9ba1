"""`python -m mgpu_slurm` is the same program as `mgpu-slurm`."""

from mgpu_slurm.cli.main import main

if __name__ == "__main__":
    main()
