#!/bin/bash
# Each node is a site: sbatch --nodes 2 deploy/slurm.sh train.py --epochs 3
#SBATCH --job-name=outergrad
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs of one node differ
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# GLOO_SOCKET_IFNAME=ib0 names the network interface, where gloo takes the wrong one.

srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "${PROCESSES_PER_NODE:-1}" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:$port" \
  "$@"
