#!/bin/sh
# pythons.sh TESTS…: a fast part on every Python that is here.
set -eu
for version in 3.11 3.12 3.13 3.14; do
  python=$(command -v python$version || true)
  if [ -z "$python" ] || ! "$python" -c 'import sys' 2>/dev/null; then
    echo "Python $version: unproved here, it is not installed"
    continue
  fi
  here=.venv/python$version
  .venv/bin/uv venv --quiet --clear --python "$python" $here
  .venv/bin/uv pip install --quiet --python $here/bin/python --editable '.[compute,datasets,s3]' pytest hypothesis pillow
  echo "Python $version: $($here/bin/python -m pytest -q -p no:cacheprovider "$@" 2>&1 | tail -n 1)"
  $here/bin/python -m brim build examples/sample/scans $here/out --quiet
  $here/bin/python -m brim verify $here/out examples/sample/scans --quiet
done
