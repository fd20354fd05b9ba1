#!/bin/bash
#SBATCH --job-name=queued-20261125-162007-a89e
#SBATCH --nodes=2
#SBATCH --output=@PROJECT@/runs/queued-20261125-162007-a89e/logs/launch-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --comment=mgpu-b80eb1f55d1f55dd

mgpu_token=${1:-mgpu-b80eb1f55d1f55dd}
set --
run=@PROJECT@/runs/queued-20261125-162007-a89e
exec @PYTHON@ -m mgpu_slurm.runtime.batch "$run" --token "$mgpu_token" -- srun --job-name=queued-20261125-162007-a89e --export=ALL --kill-on-bad-exit=1 --nodes=2 --ntasks-per-node=1 --unbuffered @PYTHON@ -m mgpu_slurm.runtime.entry "$run"
