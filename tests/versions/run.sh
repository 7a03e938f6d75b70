#!/bin/sh
# run.sh lowest|newest PYTHON TESTS…: brim with the lowest or the newest versions of what it depends on.
set -eu
kind=$1 python=$2
shift 2
here=.venv/$kind
extras="--extra compute --extra datasets --extra fast --extra neuro --extra ray --extra s3 --extra sql --extra watch"
uv=.venv/bin/uv
[ -x $uv ] || uv=uv
case $kind in
lowest) how="--resolution lowest-direct --constraint tests/versions/lowest.txt" ;;
newest) how="--prerelease allow --constraint tests/versions/newest.txt" ;;
*) echo "run.sh lowest|newest PYTHON TESTS…" >&2; exit 2 ;;
esac
$uv venv --quiet --clear --python "$python" $here
# shellcheck disable=SC2086
$uv pip compile --quiet pyproject.toml $extras $how --python $here/bin/python --output-file $here/versions.txt >/dev/null
$uv pip install --quiet --python $here/bin/python --requirement $here/versions.txt --requirement tests/versions/tools.txt
$uv pip install --quiet --python $here/bin/python --no-deps --editable .
grep -E '^(rich|click|huggingface-hub|datasets|pyarrow|tokenizers|ray|obstore|numpy|duckdb)==' $here/versions.txt |
  tr '\n' ' '
echo
[ $kind = newest ] || $here/bin/python tests/versions/bounds.py $here/versions.txt
exec $here/bin/python -m pytest -q -n "${JOBS:-2}" --dist worksteal -p no:cacheprovider "$@"
