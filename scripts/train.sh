#!/usr/bin/env bash
# Run rl_megatron under torchrun, on one node or on several (start it on each node, at about the same time).
#   scripts/train.sh train experiment=quickstart parallel.tensor=2
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=first-node scripts/train.sh train experiment=quickstart     NODE_RANK=1 on the other
# All arguments go to `python -m rl_megatron`. `serve` and `balance` are started without torchrun.
#   NPROC_PER_NODE  ranks per node (default: the number of GPUs, or 1)
#   NNODES          number of nodes (default 1); several nodes meet at MASTER_ADDR:MASTER_PORT
#   MASTER_ADDR     name or address of a node that all nodes can reach
#   MASTER_PORT     a free port on that node (default 29500)
#   NODE_RANK       0 on the node MASTER_ADDR, 1 on the next one, and so on (default: SLURM_NODEID)
#   NODE_ADDR       optional: the address at which other nodes reach this node, if they cannot resolve its host name
#   JOB_ID          in the place of NODE_RANK: a word that only the job's nodes know. They get their ranks in the order in
#                   which they come (c10d rendezvous)
#   MAX_RESTARTS    how often torchrun restarts the ranks after a failure (default 0); a run resumes from its newest
#                   checkpoint
#   VENV            the virtual environment (default: .venv of this repository if it exists, otherwise python3)
# NCCL and gloo choose a network interface by themselves; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME override it.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${VENV:-}" ] && [ -x "$repo/.venv/bin/python3" ]; then VENV=$repo/.venv; fi
python=${VENV:+$VENV/bin/}python3
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
case "${1:-}" in serve | balance) exec "$python" -m rl_megatron "$@" ;; esac # they have no ranks

if [ -z "${NPROC_PER_NODE:-}" ]; then
  NPROC_PER_NODE=$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')
fi
meeting=(--nproc-per-node "$NPROC_PER_NODE" --max-restarts "${MAX_RESTARTS:-0}")
if [ "${NNODES:-1}" = 1 ]; then
  meeting+=(--standalone) # the ranks meet at the loopback address
else
  : "${MASTER_ADDR:?NNODES=$NNODES needs MASTER_ADDR, a node that all of them can reach}"
  MASTER_PORT=${MASTER_PORT:-29500}
  meeting+=(--nnodes "$NNODES" ${NODE_ADDR:+--local-addr "$NODE_ADDR"})
  if [ -z "${NODE_RANK:-}" ] && [ -n "${JOB_ID:-}" ]; then
    meeting+=(--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$JOB_ID")
  else
    NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
    : "${NODE_RANK:?NNODES=$NNODES needs NODE_RANK, which is 0 on $MASTER_ADDR, or JOB_ID, a secret word}"
    meeting+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
  fi
fi
exec "$python" -m rl_megatron.cli.launcher "${meeting[@]}" -m rl_megatron "$@"
