#!/bin/bash
# Submits what is missing of a saved plan as an array, and the job that finishes it when the array has ended.
#
#   ./brim-submit.sh /shared/arc.plan 100              a plan of brim plan --save
#   ./brim-submit.sh /shared/t.plan 100 tokenize       a plan of brim map, tokenize or embed --save
#
# Run it again after anything: parts that are done are not submitted again. ROUNDS (default 2) is how often the
# finishing job does that by itself if parts failed. Slurm's own variables set what the tasks may take, like
# SBATCH_PARTITION, SBATCH_TIMELIMIT, SBATCH_MEM_PER_NODE.
set -eu

export PLAN=${1:?which PLAN?} PARTS=${2:?in how many parts?} VERB=${3:-build} ROUNDS=${ROUNDS:-2}
here=$(cd "$(dirname "$0")" && pwd)
export SUBMIT=$here/brim-submit.sh

missing=$(brim plan --plan "$PLAN" --list-missing "$PARTS")
after=()
if [ -n "$missing" ]; then
    array=$(sbatch --parsable --export=ALL --array="$missing" "$here/brim-array.sbatch")
    after=(--dependency="afterany:$array")      # not afterok: it says which parts failed, and submits them again
    echo "array $array: parts $missing of $PARTS"
fi
echo "finish $(sbatch --parsable --export=ALL "${after[@]}" "$here/brim-finish.sbatch")"
