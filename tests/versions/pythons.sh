#!/bin/sh
# pythons.sh TESTS…: a fast part on every Python that is here, wherever it was installed; the others are named.
set -eu
failed=""

find_python() { # of a version: the first that starts; one of pyenv may be there without being switched on
  for python in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/"python$1"; do
    if "$python" -c 'import venv' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  .venv/bin/uv python find --quiet --no-python-downloads "$1" 2>/dev/null
}

for version in 3.11 3.12 3.13 3.14; do
  if ! python=$(find_python $version); then
    echo "Python $version: unproved here, it is not installed"
    continue
  fi
  here=.venv/python$version
  .venv/bin/uv venv --quiet --clear --python "$python" $here
  .venv/bin/uv pip install --quiet --python $here/bin/python --editable '.[compute,datasets,s3]' pytest hypothesis
  $here/bin/python -m pytest -q -p no:cacheprovider "$@" >$here/log 2>&1 || failed="$failed $version"
  echo "$($here/bin/python --version): $(tail -n 1 $here/log)"
  $here/bin/python -m brim build examples/sample/scans $here/out --quiet
  $here/bin/python -m brim verify $here/out examples/sample/scans --quiet
done
if [ -n "$failed" ]; then
  echo "FAILED:$failed (.venv/pythonVERSION/log)"
  exit 1
fi
