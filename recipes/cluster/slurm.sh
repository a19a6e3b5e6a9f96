#!/usr/bin/env bash
# A run on Slurm, one Ray node per machine: sbatch recipes/cluster/slurm.sh recipes/gsm8k.yaml run.root=/shared/runs
#SBATCH --job-name=rlhfless-ray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: sbatch $0 RECIPE [section.key=value …]" >&2; exit 2; }

port=6379
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
# since Slurm 22.05 a step has one core of its node unless --cpus-per-task says otherwise
on() { srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --nodelist="$1" "${@:2}"; }
address=$(on "$head" hostname --ip-address | tr ' ' '\n' | awk '/^[0-9.]+$/ && !found++') # hostname may print an IPv6 address first

# --block keeps each Ray node in the foreground of its step, so Slurm ends it with the job
on "$head" ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
for node in "${nodes[@]:1}"; do # these wait for the head
  on "$node" ray start --address="$address:$port" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
done

export RAY_ADDRESS=$address:$port
for _ in $(seq 60); do # two minutes for all nodes to join
  alive=$(python -c "import ray; ray.init(log_to_driver=False, logging_level='error'); print(sum(n['Alive'] for n in ray.nodes()))" 2>/dev/null || echo 0)
  [ "$alive" -ge "${#nodes[@]}" ] && break
  sleep 2
done
[ "$alive" -ge "${#nodes[@]}" ] || { echo "only $alive of ${#nodes[@]} nodes joined Ray within two minutes" >&2; exit 1; }

# Slurm's TERM reaches this shell; the run saves a checkpoint and ends within run.sigterm_s
python -m rlhfless_ray train "$@" run.sigterm_s=90 &
run=$!
trap 'kill -TERM "$run"' TERM
wait "$run" || { status=$?; wait "$run" || status=$?; exit "$status"; }
