# On a machine with Python 3.11 and nothing else:  make demo   or   make test
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install -c constraints.txt

.PHONY: help setup demo docs test test-nccl lint prove fuzz faults bench clean

help:
	@echo "make demo    train a small GPT on a simulated 2x4 mesh next to one device   (ARGS='--ranks 4' for real processes)"
	@echo "make test    lint, then all tests                                           (ARGS='-k name' for some)"
	@echo "make test-nccl   tests on a GPU, also of four NCCL ranks that share it; says so where there is none"
	@echo "make lint    ruff and mypy"
	@echo "make prove   every operator on every kind of layout; writes docs/operators.md (ARGS='--only add,mm' for some)"
	@echo "make fuzz    random programs on meshes next to one device                     (ARGS='--minutes 60', '--processes 4')"
	@echo "make faults  faults of 60 kinds put into programs of real processes: how they end (ARGS='--count 60')"
	@echo "make bench   overhead against plain torch and torch's own DTensor           (ARGS='--quick')"
	@echo "make docs    the documentation site, in build/site: open build/site/index.html"
	@echo "make clean   remove .venv and caches"

setup: $(STAMP)

# The pinned torch goes in first, alone, so that nothing later can choose another one.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/train_gpt.py $(ARGS)

# Each test process would compile the library anew where nothing may be written beside it.
unexport PYTHONDONTWRITEBYTECODE

# More workers than cores: tests of processes mostly wait for each other.
test: lint
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

# Four NCCL ranks share the GPUs that there are, also one.
test-nccl: $(STAMP)
	@if $(BIN)/python -c "import torch; raise SystemExit(not torch.cuda.is_available())"; \
	then $(BIN)/python -m pytest -ra tests/test_nccl.py tests/test_cuda.py tests/test_*_cuda.py tests/*/test_*_cuda.py $(ARGS); \
	else echo "test-nccl: torch sees no CUDA device here, so nothing was tested"; fi

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python .ci/any_budget.py
	$(BIN)/python .ci/sizes.py

# Resumable: what was tried stands in build/prove; ARGS=--fresh starts anew.
prove: $(STAMP)
	$(BIN)/python -m shardwise.testing.prove --docs docs/operators.md $(ARGS)

# In worlds of 2 to 4 processes, some at a time; exits with 1 if a fault did not end right.
# Programs that differ are made short and written to build/fuzz.
fuzz: $(STAMP)
	$(BIN)/python -m shardwise.testing.fuzz $(ARGS)

faults: $(STAMP)
	$(BIN)/python -m shardwise.testing.faults $(ARGS)

# Needs the network only to install MkDocs, once; warnings are errors.
docs: $(STAMP)
	$(BIN)/python -c "import mkdocs, material, mkdocstrings" 2> /dev/null || $(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
