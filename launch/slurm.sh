#!/usr/bin/env bash
# One run over all hosts of a Slurm job, from the repository's root:
#
#   sbatch --nodes=4 --gpus-per-node=8 launch/slurm.sh configs/a100_prod.py [flags of train.py]
#
# One process per host takes all of its GPUs; train.py finds the others by itself.
#SBATCH --job-name=nsa_jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.log
set -euo pipefail

config=${1:?usage: sbatch launch/slurm.sh CONFIG [flags of train.py]}
shift
cd "${SLURM_SUBMIT_DIR:-.}"
python=${PYTHON:-.venv/bin/python}

# When a process is lost, the others say which and end with 75, or with the status of one that failed for good: they need
# the half minute to find out, so that srun must not kill them at once.
status=0
# srun of Slurm 22.05 and 23.02 does not take the CPUs per task from the job.
cpus=${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}
srun --label --kill-on-bad-exit=0 --wait=300 ${cpus:+"$cpus"} "$python" -u train.py --config="$config" --distributed "$@" || status=$?

# 75: saved before the time limit or a preemption, or a process was lost or stood still; 134, 137, 139: the lost one's
# own status (aborted, killed, crashed); 143: the time limit came before there was anything to save. Every other status
# would be the same again: 0 finished, 1 and 2 faults, 3 a guard.
restarts=${SLURM_RESTART_COUNT:-0}
case $status in
  75 | 134 | 137 | 139 | 143)
    if [ "$restarts" -lt "${MAX_RESTARTS:-100}" ]; then
      echo "status $status: the job is queued again and resumes from its last checkpoint (restart $((restarts + 1)))"
      scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$status"
