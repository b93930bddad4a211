#!/bin/bash
#SBATCH --job-name=thinwire
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
# sbatch examples/clusters/slurm.sh --method int8 --preset small      (arguments of thinwire train)

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
srun thinwire train --resume auto --out runs/slurm "$@"
