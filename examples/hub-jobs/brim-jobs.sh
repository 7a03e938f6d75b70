#!/bin/bash
# Run the missing parts of a saved plan as Jobs on the Hub, wait for them, and publish.
#
#   IMAGE=registry.example/brim:1 ./brim-jobs.sh hf://buckets/me/plans/arc.plan 8              a plan of brim plan --save
#   IMAGE=registry.example/brim:1 ./brim-jobs.sh hf://buckets/me/plans/t.plan 8 tokenize       of map, tokenize or embed
#
# IMAGE is a container image with brim and its extras. The plan, its source and its destination must be in a bucket or on
# the Hub. Run it again after anything: parts that are done are not submitted again.
set -eu

PLAN=${1:?usage: brim-jobs.sh PLAN PARTS [COMMAND]} PARTS=${2:?the number of parts, always the same for a plan}
COMMAND=${3:-build}

missing=$(brim plan --plan "$PLAN" --list-missing "$PARTS")
jobs=()
for range in ${missing//,/ }; do
    for part in $(seq "${range%-*}" "${range#*-}"); do
        jobs+=("$(hf jobs run --quiet --detach --attempts 3 --secrets HF_TOKEN \
            --flavor "${FLAVOR:-cpu-upgrade}" --timeout "${TIMEOUT:-12h}" \
            "${IMAGE:?an image with brim}" brim "$COMMAND" --plan "$PLAN" --part "$part/$PARTS")")
    done
done
if [ ${#jobs[@]} -gt 0 ]; then
    echo "parts $missing of $PARTS: ${#jobs[@]} jobs"
    hf jobs wait "${jobs[@]}" || echo "some jobs failed: brim names their parts"
fi
brim "$COMMAND" --plan "$PLAN" --finish
