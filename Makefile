# The environment is .venv, made again when pyproject.toml or constraints.txt change: first what the demo needs (DEMO),
# and the rest for the targets that need more (STAMP).
PYTHON ?= python3
VENV := .venv
WORKERS ?= 2
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet

.PHONY: run test check docs bench nightly soak fuzz faults mutants sanitize zoo gpu cuda-dry wheels clean help

run: $(DEMO) ## make the environment of the demo, then run it
	@PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m examples.demo

test: $(STAMP) ## make the whole environment, then run every check and test (WORKERS=2)
	@scripts/install-browser
	@scripts/check
	@$(VENV)/bin/python -m tests.rig.building
	@# Passive: the threads of one worker would spin on the cores that another needs. Bytecode is kept: hundreds of
	@# processes import the same modules, and each worker rewrites those of the tests.
	@PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal --durations=15

check: $(STAMP) ## formatting, lint, types and hygiene
	@scripts/check

docs: $(STAMP) ## these pages and the reference of the Python interface, in build/docs
	@$(VENV)/bin/python -m sphinx -W --keep-going -q -b html -c docs . build/docs
	@echo "Open build/docs/index.html"

bench: $(STAMP) ## measure against the disk, memory and the peers (SIZE=4GiB)
	@$(VENV)/bin/python -m benchmarks.disk $(if $(SIZE),--size $(SIZE))

nightly: $(STAMP) ## the long tests and hunts, one after another: 200 random programs, and a share of each of those below
	@OMP_WAIT_POLICY=passive $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m nightly --timeout=0
	@$(VENV)/bin/python -m tests.random_programs --programs 200
	@$(VENV)/bin/python -m tests.soak.endurance
	@PENSTOCK_SOAK=10 $(VENV)/bin/python -m pytest -n $(WORKERS) -m random --timeout=0 --ignore=tests/faults \
		--ignore=tests/random_programs
	@$(MAKE) --no-print-directory fuzz FOR=60
	@$(MAKE) --no-print-directory sanitize
	@$(VENV)/bin/python -m benchmarks.zoo.random_models --transformers 15 --diffusers 5
	@$(MAKE) --no-print-directory mutants SAMPLE=10

soak: $(STAMP) ## a long run of passes and loads (LOADS=1000), and random problems, many times as many as in the tests (TIMES=50)
	@$(VENV)/bin/python -m tests.soak.endurance --loads $(or $(LOADS),1000) --passes $(or $(LOADS),1000)0
	@PENSTOCK_SOAK=$(or $(TIMES),50) $(VENV)/bin/python -m pytest -n $(WORKERS) -m random --timeout=0

fuzz: $(STAMP) ## files of strangers, changed at random: so many seconds for each reader (FOR=600 SEED=1 TARGETS=graph)
	@$(VENV)/bin/python -m tests.trust.fuzz --seconds $(or $(FOR),600) --seed $(or $(SEED),1) $(TARGETS)

faults: $(STAMP) ## every call on files goes wrong in every way, one at a time, in all that penstock does with files
	@PENSTOCK_SOAK=2 $(VENV)/bin/python -m pytest -n $(WORKERS) -m "not sanitize" --timeout=0 tests/faults

mutants: $(STAMP) ## one change at a time, which the closest tests must see (ROOM=runtime/stream SAMPLE=30 SEED=1)
	@$(VENV)/bin/python -m tests.mutants.run $(ROOM) --sample $(or $(SAMPLE),30) --seed $(or $(SEED),1)

zoo: $(STAMP) ## architectures that a seed chooses, tiny, through apply: an hour (SEED=7)
	@$(VENV)/bin/python -m benchmarks.zoo.random_models $(if $(SEED),--seed $(SEED))

sanitize: $(STAMP) ## the native engine and ExecuTorch's delegate under sanitizers of threads, addresses, undefined behaviour
	@$(VENV)/bin/python -m pytest -n 0 -m sanitize --timeout=0 tests/native tests/backends/executorch/delegate

gpu: $(STAMP) ## nine minutes on a GPU: what is known only there, a line of JSON each (DEVICE=xpu)
	@$(VENV)/bin/python -m benchmarks.gpu --results build/gpu.jsonl $(if $(DEVICE),--device $(DEVICE))

cuda-dry: $(STAMP) ## no GPU: CUDA's tests on torch's CUDA build and a counterfeit libcudart; 0.5 GB to download (WHEEL=FILE)
	@$(VENV)/bin/python scripts/fake-cudart/dry.py $(if $(WHEEL),--wheel $(WHEEL))

wheels: ## a release in dist: the sdist, and wheels for Linux on x86-64 and arm64
	@scripts/build-wheels

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build dist src/penstock.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

$(DEMO): pyproject.toml constraints.txt $(wildcard native/*.cpp native/*.h native/*.map native/sparse/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "penstock needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	@echo "Installing penstock and what the demo needs (torch, transformers, a model) in $(VENV): a minute or two."
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@scripts/install-compiler
	@# setuptools first: it then builds penstock itself, at the version that the constraints pin.
	@$(PIP) install -c constraints.txt setuptools wheel
	@$(VENV)/bin/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*p["dependencies"], *p["optional-dependencies"]["demo"], sep="\n")' >$(VENV)/demo.txt
	@# The engine is compiled while wheels arrive. Bytecode is written by the first import: to compile all modules would
	@# take 40 s.
	@$(PIP) install -c constraints.txt --no-compile --no-build-isolation --no-deps -e . & penstock=$$!; \
		$(PIP) install -c constraints.txt --no-compile -r $(VENV)/demo.txt; needed=$$?; wait $$penstock && exit $$needed
	@touch $@

$(STAMP): $(DEMO) $(wildcard native/aoti/* native/run/* native/executorch/*)
	@echo "Installing what tests, checks, pages and benchmarks need in $(VENV): the first time takes a few minutes."
	@# By its name: penstock is there, and only what its extras need is installed.
	@$(PIP) install -c constraints.txt 'penstock[bench,dev]'
	@scripts/build-run || echo "penstock-run could not be built; everything else works without it."
	@scripts/build-delegate || echo "ExecuTorch's delegate could not be built; everything else works without it."
	@touch $@
