#!/bin/bash
# Starts a run on a Slurm GPU cluster, one process per GPU:
#
#   sbatch --nodes=4 --gpus-per-node=8 --ntasks-per-node=8 scripts/launchers/slurm.sh \
#     --config=configs/chinchilla.py:1.3B,M=4 --workdir=/shared/runs/1.3B
#
# --workdir must lie in a bucket, or on a file system that all nodes mount. Every process
# is a `diloco.main` with the arguments after the script's name. Two minutes before the
# time limit all processes save the same step and end. The job then goes back into the
# queue, until the run is done. A sweep submits this file with `job RUN`.
#SBATCH --job-name=diloco
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

if [[ "${1:-}" == job ]]; then
  # Trains by this file, inside of the same job, and notes how the run ended.
  exec python -m diloco "$@" --launch="bash '$0' {flags}"
fi
workdir=""
for argument in "$@"; do
  case "$argument" in --workdir=*) workdir="${argument#--workdir=}" ;; esac
done
if [[ -z "$workdir" ]]; then
  echo "error: give --workdir=DIR in a bucket or on a file system that all nodes mount." >&2
  exit 2
fi

# JAX reads the coordinator's address, the number of processes and the number of each
# process from Slurm's variables.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun ignores sbatch's.
srun --kill-on-bad-exit=1 \
  python -m diloco.main --distributed=auto --initialization_timeout=600 "$@"

# The processes ended without an error: the run is done, or the time limit was near.
# Python looks, because the folder may be ~/RUN or in a bucket.
is_done='import sys; from diloco.util.remote import local_copy
sys.exit(not (local_copy(sys.argv[1], "--workdir") / "summary.json").exists())'
if ! python -c "$is_done" "$workdir"; then
  scontrol requeue "$SLURM_JOB_ID"
fi
