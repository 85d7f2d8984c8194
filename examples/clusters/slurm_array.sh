#!/usr/bin/env bash
#SBATCH --job-name=reshard
#SBATCH --array=1-4
#SBATCH --cpus-per-task=2
#SBATCH --mem=1G
#
# One part of a saved plan for each job of an array. On the login node, once:
#
#     shardwise plan SRC DST --mesh model=4 --rules rules.toml --save new.swplan
#     parts=$(sbatch --parsable examples/clusters/slurm_array.sh new.swplan)
#     sbatch --dependency=afterok:$parts --wrap "shardwise commit new.swplan"
#
# Submit a job that fails or is killed again as it was; what it had done is not repeated.
# Without Slurm, `bash examples/clusters/slurm_array.sh` shows everything on a small checkpoint, with the parts as
# processes of this machine.
set -euo pipefail

if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  exec shardwise run "$1" --part "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" \
    --jobs "${SLURM_CPUS_PER_TASK:-1}" --memory 256MiB --quiet
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python - <<'END'
import numpy as np
import shardwise as sw
rng = np.random.default_rng(0)
sw.save_checkpoint("small.safetensors", {f"{i}.weight": rng.standard_normal((512, 2048), "f4") for i in range(8)})
END
printf '[rules]\n"[.]weight$" = [[], "model"]\n' > rules.toml
shardwise plan small.safetensors for-4 --mesh model=4 --rules rules.toml --save new.swplan
jobs=()
for part in 3 1 4 2; do
  shardwise run new.swplan --part "$part/4" --jobs 1 --quiet &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
shardwise commit new.swplan
shardwise diff small.safetensors for-4 --quiet
