#!/bin/sh
# trainers.sh PYTHON: the tests marked `trainers`, in environments of their own: the newest TRL, and TRL 0.24, which makes
# labels of masks. trainers.sh PYTHON FILE ARGUMENT…: a benchmark in the first one.
set -eu
python=$1
shift

make_environment() { # FOLDER PACKAGE…
  here=$1
  shift
  [ -x "$here/bin/python" ] || "$python" -m venv "$here"
  "$here/bin/pip" install --quiet --disable-pip-version-check "$@"
}

make_environment .venv/trainers torch==2.13.0
make_environment .venv/trainers trl transformers datasets accelerate jinja2 --editable '.[dev]'
if [ $# -gt 0 ]; then
  exec .venv/trainers/bin/python "$@"
fi
make_environment .venv/megatron torch==2.13.0
make_environment .venv/megatron megatron-core numpy
make_environment .venv/trainers-old torch==2.13.0
make_environment .venv/trainers-old trl==0.24.0 accelerate jinja2 --editable '.[dev]'
BRIM_MEGATRON=$PWD/.venv/megatron/bin/python .venv/trainers/bin/python -m pytest -m trainers \
  tests/compute/test_chat_oracle.py tests/compute/test_chat_trainers.py tests/compute/test_megatron.py
.venv/trainers-old/bin/python -m pytest -m trainers tests/compute/test_chat_trainers.py
