.PHONY: demo demo-sweep test test-slurm test-torch quick gpu chaos long check docs pictures bench clean cluster cluster-deps try-cluster-deps cluster-env \
    cluster-down
.DELETE_ON_ERROR:

PYTHON ?= python3
PROBE := import sys; sys.version_info < (3, 10) and sys.exit("it is Python %d.%d" % sys.version_info[:2]); import ensurepip, venv
# the last line of what the probe says; empty where this Python will do
PROBLEM = $(shell $(PYTHON) -c '$(PROBE)' 2>&1 | tail -n 1)
ADVICE = install Python 3.10 or newer with its venv module, or name one: make PYTHON=python3.12

READY := .venv/ready
CLUSTER := .cluster/ready
RELEASES := 22.05 24.11
SLURM ?= 22.05

# what `make test-torch` tests with; NumPy is that of constraints.txt if none is named
TORCH ?= 2.6.0
NUMPY ?=
TORCH_ENV = .torch/$(TORCH)$(NUMPY:%=-numpy-%)$(patsubst %,-%,$(filter-out python3,$(notdir $(PYTHON))))
# the release of torchao for each; it does not say itself which torch it needs
TORCHAO = $(patsubst $(TORCH):%,==%,$(filter $(TORCH):%,2.6.0:0.10.0 2.7.1:0.11.0 2.8.0:0.13.0 2.9.1:0.14.1))
QUICK := $(addprefix tests/,core run_folder request slurm registry submission metrics sweeps/search test_docs.py \
    test_imports.py)

demo: $(READY)
	.venv/bin/python -m mgpu_slurm submit --nodes 2

# about a minute; the job's defaults are the first of its trials
demo-sweep: $(READY)
	.venv/bin/python -m mgpu_slurm sweep sweeps/digits_hyperband.yaml --executor local study=demo trials=16 workers=2

# tests that need a cluster, a database server or a browser are skipped if there is none; with CI=true they fail
# pip and the packages of the cluster take a minute each, and wait for different things. Five processes suit two cores, as
# many tests wait for SLURM or a time limit. The program is compiled first: tests start it hundreds of times, and
# PYTHONDONTWRITEBYTECODE may keep it from storing its bytecode.
test:
	@$(MAKE) --silent --no-print-directory --jobs=2 $(READY) $(if $(filter 0,$(shell id -u)),try-cluster-deps)
	.venv/bin/python -m compileall -q mgpu_slurm
	.venv/bin/python -m pytest --numprocesses 5 --dist loadscope --no-loadscope-reorder

# unit tests only: no cluster, no database server, few processes; under a minute on two cores
quick: $(READY)
	.venv/bin/python -m pytest -q --numprocesses 2 --dist loadscope $(QUICK)

# the tests and the benchmark that need a GPU, which `make test` leaves out
gpu: $(READY)
	.venv/bin/python -m pytest -m gpu -rs
	.venv/bin/python -m benchmarks gpu

# what was done for this commit is not done again; as root, for its SLURM, its small disks and its cut connections
chaos: $(READY) cluster-deps
	.venv/bin/python -m tests.chaos .chaos/$$(git rev-parse --short HEAD) --rounds 100
	for layout in fsdp tensor pipeline zero2 hsdp fsdp-tensor pipeline-ddp pipeline-fsdp; do \
		.venv/bin/python -m tests.chaos .chaos/$$(git rev-parse --short HEAD)-$$layout --rounds 10 --layout $$layout || exit 1; \
	done

# what takes too long for `make test`: workers that are killed at each write to their study, on a journal and on
# PostgreSQL; and the sweeps in sweeps/ on a real SLURM
long: $(READY) cluster-deps
	.venv/bin/python -m tests.deaths
	.venv/bin/python -m pytest -m long

check: $(READY)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

# the documentation as a site, in site/; neither this nor its readers need a network
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

# the pictures of the README and the documentation, from real runs; a few minutes
pictures: $(READY) cluster-deps
	.venv/bin/python -m tests.pictures

bench: $(READY)
	.venv/bin/python -m benchmarks

# the tests on a real SLURM, all of them on one of its releases: make test-slurm SLURM=24.11
test-slurm: $(READY) cluster-deps
	TEST_SLURM=$(SLURM) .venv/bin/python -m pytest --numprocesses 3 --dist loadscope -rs tests/on_slurm

# the tests with another torch, and NumPy and Python if named: make test-torch TORCH=2.9.1 NUMPY=1.26.4 PYTHON=python3.10.
# Each combination has its own environment, of 6 GB with CUDA's libraries.
test-torch: $(TORCH_ENV)/ready
	@[ "$$(id -u)" != 0 ] || $(MAKE) --silent --no-print-directory try-cluster-deps
	$(TORCH_ENV)/bin/python -m compileall -q mgpu_slurm
	$(TORCH_ENV)/bin/python -m pytest --numprocesses 5 --dist loadscope --no-loadscope-reorder -rs

# a real SLURM of four nodes on this machine, of which the machine notices nothing; also SLURM=24.11
cluster: cluster-deps
	@$(PYTHON) -m tests.on_slurm.cluster up $(SLURM)

cluster-env:
	@$(PYTHON) -m tests.on_slurm.cluster env $(SLURM)

cluster-down:
	@$(PYTHON) -m tests.on_slurm.cluster down $(SLURM) && echo "The cluster is down."

cluster-deps: $(CLUSTER) $(RELEASES:%=.cluster/%/ready) .cluster/image/ready

try-cluster-deps:
	@$(MAKE) --silent --no-print-directory cluster-deps || [ "$$CI" = true ] \
	    || echo 'The tests of SLURM, database servers and HTML pages are skipped.'

# touched last, as below
$(CLUSTER): tests/on_slurm/packages.py
	@echo "Unpacking Debian's packages of PostgreSQL, MariaDB, Charliecloud and Chromium into .cluster (about 200 MB; nothing is installed)"
	@$(PYTHON) tests/on_slurm/packages.py .cluster
	@touch $@

.cluster/image/ready: tests/on_slurm/packages.py
	@echo "Unpacking the system of a container into .cluster/image"
	@$(PYTHON) tests/on_slurm/packages.py .cluster image
	@touch $@

.cluster/%/ready: tests/on_slurm/packages.py
	@echo "Unpacking SLURM $* into .cluster/$*"
	@$(PYTHON) tests/on_slurm/packages.py .cluster $*
	@touch $@

# touched last: an installation that was interrupted starts again
$(READY): pyproject.toml constraints.txt
	$(if $(PROBLEM),$(error $(PYTHON) cannot make .venv ($(PROBLEM)): $(ADVICE)))
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	touch $@

# what torch and NumPy decide is left to pip
$(TORCH_ENV)/ready: pyproject.toml constraints.txt
	$(if $(PROBLEM),$(error $(PYTHON) cannot make $(TORCH_ENV) ($(PROBLEM)): $(ADVICE)))
	$(PYTHON) -m venv $(TORCH_ENV)
	grep -vE '^(torch|torchvision|torchao|sympy$(if $(NUMPY),|numpy|ml_dtypes))==' constraints.txt > $(TORCH_ENV)/constraints.txt
	$(TORCH_ENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(TORCH_ENV)/constraints.txt \
	    torch==$(TORCH) torchao$(TORCHAO) $(NUMPY:%=numpy==%) -e '.[dev,docs]'
	touch $@

clean:
	rm -rf .venv .torch .bench .chaos build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./runs -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
