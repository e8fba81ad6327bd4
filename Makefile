# make demo    the whole story on this machine, no GPU, no root
# make test    what the tests need is installed into .venv, then they run; HOSTS=1 adds real test hosts (root) and SLOW=1,
#                     LONG=1 what takes minutes each
#                     ORDER=random runs them in another order each time; pytest says the seed
# make coverage       the tests once more, counted: branch coverage into results/tests/coverage.txt
# make mutants        a sample of small changes to deploy, exactness and units, and which of them no test notices, into
#                     results/tests/mutants.txt (half an hour on two cores)
# make release-check  releases built twice in two places and compared byte for byte, the patches over the real SGLang,
#                     the slim sm_90 release (downloads about 500 MB once)
# make gate-report    every planted fault and 200 healthy runs through the exactness gate (about an hour on two cores)
# make fault-matrix   every way in which a deploy can go wrong, on real test hosts, each to its declared end (root, a
#                     quarter of an hour on two calm cores; what is done is not run again: call it again to go on)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH := torch==2.13.0+cpu
# where PyTorch publishes its CPU builds; asked only when pip's own index does not have one
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# processes that the tests are spread over; many tests wait for something, so more than two cores' worth
WORKERS ?= 3
SPREAD = -n $(WORKERS) $(if $(filter random,$(ORDER)),-p randomly)
export PIP_CACHE_DIR := $(CURDIR)/.local/pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export XDG_CACHE_HOME := $(CURDIR)/.local/cache

.PHONY: demo test coverage mutants lint clean gate-report fault-matrix release-check
demo: .venv-demo/ready
	.venv-demo/bin/ddtree build --engine reference
	.venv-demo/bin/ddtree demo

test: .venv/ready lint
	$(if $(HOSTS),tests/hosts/install-needs)
	.venv/bin/python -m pytest $(SPREAD)

coverage: .venv/ready
	rm -rf .local/coverage results/tests/coverage.txt
	mkdir -p .local/coverage results/tests
	.venv/bin/coverage run -m pytest $(SPREAD) \
	    --deselect tests/unit/host/test_deploy.py::test_the_lease_is_kept_on_a_full_disk  # coverage writes there
	.venv/bin/coverage combine -q
	.venv/bin/coverage report --skip-covered --sort=cover > results/tests/coverage.txt
	grep TOTAL results/tests/coverage.txt

mutants: .venv/ready
	.venv/bin/pip install -q "mutmut>=3.8,<4"
	.venv/bin/python -m tests.mutants

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	MYPYPATH=training .venv/bin/mypy --strict training/*.py

.venv-demo/ready: pyproject.toml
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "python3 cannot make virtual environments here: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv-demo
	.venv-demo/bin/pip install -q -e .
	touch $@

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "python3 cannot make virtual environments here: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	.venv/bin/pip install -q "$(TORCH)" || .venv/bin/pip install -q --extra-index-url $(TORCH_INDEX) "$(TORCH)"
	.venv/bin/pip install -q -e '.[reference,dev]'
	touch $@

gate-report: .venv/ready
	.venv/bin/python -m tests.detector --out results/gate

fault-matrix: .venv/ready
	tests/hosts/install-needs
	.venv/bin/python -m tests.hosts.matrix

release-check: .venv/ready
	.venv/bin/python tests/release/check.py

clean:
	rm -rf .venv .venv-demo .local .mypy_cache .ruff_cache .pytest_cache .hypothesis
