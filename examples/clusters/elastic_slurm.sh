#!/bin/bash
#SBATCH --job-name=thinwire-elastic
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --no-kill
# sbatch examples/clusters/elastic_slurm.sh --method int8 --preset small      (arguments of thinwire train)
# One replica per node, and the lighthouse on the first. If a node is lost, the others go on. Needs the extra elastic.

command -v torchft_lighthouse > /dev/null || { echo "torchft_lighthouse is not on PATH: pip install 'thinwire[elastic]'" >&2; exit 1; }
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
HOST=$(hostname)
PORT=$((20000 + SLURM_JOB_ID % 10000))
torchft_lighthouse --bind "$HOST:$PORT" --min_replicas 1 --join_timeout_ms 120000 --heartbeat_timeout_ms 2000 2> /dev/null &
trap "kill $!" EXIT
export TORCHFT_LIGHTHOUSE=http://$HOST:$PORT
srun --no-kill --wait=0 --kill-on-bad-exit=0 \
    thinwire train --elastic --replicas 1 --resume auto --out runs/elastic "$@"
