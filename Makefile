# `make demo` and `make test` do everything from a fresh clone: .venv is built when it is missing, when pyproject.toml or
# constraints.txt have changed, when the folder has moved, and when PYTHON or TORCH differ from the last time.

# Which Python builds .venv, 3.10 to 3.14, and which torch goes into it: a requirement, a path or any arguments of
# `pip install`. Where pip's find-links or extra index offer a CPU build of this version, pip takes that.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# A Python that has a torch for the card and what the tests need: `make test-cuda` then installs nothing.
CUDA_PYTHON ?=
# Further arguments for the command, as in: make demo ARGS='--prompt "a blue ring on a white background"'
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/built-for
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PIP_LOG := $(VENV)/pip.log
# A newer page than ComfyUI's own, with Nodes 2.0; COMFYUI_FRONTEND_PATH names the folder of another.
FRONTEND := $(VENV)/frontend-1.58.1

export VENV_FOR := $(CURDIR) $(PYTHON)
export TORCH_FOR := $(TORCH)

# Processes that run tests, of one thread each: small work on many threads waits for threads.
WORKERS ?= 2
test test-unit test-host test-server test-cuda soak: export OMP_NUM_THREADS = 1
# A file's tests share what it has built.
DIST = loadgroup
RUN = $(BIN)/pytest
PYTEST = $(RUN) -n $(WORKERS) --dist $(DIST) --durations=15 --durations-min=5

.PHONY: archive help install demo test test-all test-unit test-host test-server test-next-host test-next
.PHONY: soak test-cuda cuda-unit cuda-card cuda-dynamic lint fuzz micro-quality format clean rebuild

help:
	@echo "make demo           paint the default prompt with the bundled micro model into out/"
	@echo "make test           run the tests that need no ComfyUI and seconds each (CPU, 4 minutes)"
	@echo "make test-all       run all tests, inside ComfyUI and against its server too (CPU, half an hour)"
	@echo "make test-next      run them with the newest torch, ComfyUI packages and ComfyUI's code; print what broke"
	@echo "make soak           paint 600 pictures through one server, and 108 through a fleet (CPU, 45 minutes)"
	@echo "make test-cuda      run the tests that need a card (4 to 7 minutes; CUDA_PYTHON= names a Python that has all)"
	@echo "make lint           check style and types"
	@echo "make fuzz           try broken files and texts for MINUTES=10"
	@echo "make micro-quality  measure how well the micro model follows held-out prompts"
	@echo "make format         correct style"
	@echo "make archive        pack what the Comfy registry would publish into dist/"
	@echo "make clean          remove everything that make and the tests made"

# The environment of all the others.
install: $(STAMP)

demo: $(STAMP)
	@mkdir -p out
	@$(BIN)/qwen-l40s demo --output out/demo.png $(ARGS)

test: $(STAMP)
	@$(PYTEST) tests/unit -m "not slow" $(ARGS)

test-all: test-unit test-host test-server test-next-host

test-unit: $(STAMP)
	@$(PYTEST) tests/unit --hypothesis-profile=thorough $(ARGS)

# In ComfyUI's own Python, which COMFYUI_PATH or ~/ComfyUI leads to.
test-host: $(STAMP)
	@$(PYTEST) tests/host $(ARGS)

# Against a server of the same ComfyUI, and in its page: that of its own frontend, and a newer one's.
test-server: $(STAMP) $(FRONTEND)
	@$(PYTEST) tests/server tests/page -m "not soak" $(ARGS)

# The same in the newer ComfyUI at COMFYUI_NEXT_PATH: tools/next_host.md.
test-next-host: $(STAMP)
	@if [ -n "$$COMFYUI_NEXT_PATH" ]; then \
		COMFYUI_PATH="$$COMFYUI_NEXT_PATH" $(MAKE) --no-print-directory test-host test-server; \
	else echo "tests/host, tests/server, tests/page: not run in a newer ComfyUI: name one with COMFYUI_NEXT_PATH"; fi

# With the newest package of everything, in an environment of its own, and ComfyUI's without their versions. Each part
# runs, whatever broke before.
NEWEST := .venv-newest
NEXT_HOST := $(or $(COMFYUI_NEXT_PATH),$(COMFYUI_PATH),$(HOME)/ComfyUI)
test-next: export COMFYUI_PATH = $(NEXT_HOST)
test-next: export COMFYUI_PYTHON = $(CURDIR)/$(NEWEST)/bin/python
test-next: export OMP_NUM_THREADS = 1
test-next: RUN = $(NEWEST)/bin/python -m pytest -q -rfE
test-next:
	@$(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --upgrade torch torchvision torchaudio --editable '.[dev]' \
		$$(sed -nE 's/^([A-Za-z][A-Za-z0-9_.-]*) *([=<>~!;].*)?$$/\1/p' $(NEXT_HOST)/requirements.txt)
	@code=0; for part in "tests/unit -m 'not slow'" tests/host tests/server tests/page; do \
		eval $(RUN) -n $(WORKERS) --dist loadgroup $$part $(ARGS) || code=1; \
	done; exit $$code

# 40 settings of a real ComfyUI in turn, and a fleet of which one server is killed. On a card: bench/soak.py.
soak: $(STAMP)
	@$(BIN)/python -m qwen_l40s.bench.soak $(ARGS)
	@$(RUN) tests/server -m soak

# The three parts side by side, each printed when it is over.
test-cuda: $(if $(CUDA_PYTHON),,$(STAMP))
	@$(MAKE) --no-print-directory --output-sync --jobs 3 cuda-unit cuda-card cuda-dynamic

cuda-unit cuda-card cuda-dynamic: RUN = $(if $(CUDA_PYTHON),"$(CUDA_PYTHON)" -m pytest,$(BIN)/pytest)
cuda-unit: WORKERS = 6
# One at a time: in chunks, one process got all neighbours that compile long, 304 s together (an H200 with 16 cores).
cuda-unit: DIST = load --maxschedchunk 1
cuda-unit:
	@$(PYTEST) tests/unit -m cuda $(ARGS)
cuda-card cuda-dynamic: WORKERS = 4
cuda-card cuda-dynamic: cuda-%:
	@$(PYTEST) tests/host --mode $* $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@mkdir -p .mypy_cache && ln -sfn .. .mypy_cache/qwen_l40s && $(BIN)/mypy

# Broken files and texts for MINUTES, of every kind; ARGS='--only GGUF' tries one.
fuzz: $(STAMP)
	@$(BIN)/python -m qwen_l40s.tools.fuzz --minutes $(or $(MINUTES),10) $(ARGS)

micro-quality: $(STAMP)
	@$(BIN)/python -m qwen_l40s.tools.micro_quality $(ARGS)

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# What git tracks without what .comfyignore names, of the last commit.
archive:
	@mkdir -p dist
	@git ls-files -ic --exclude-from=.comfyignore >dist/left-out
	@git archive --output dist/comfyui-qwen-image-l40s.zip HEAD $$(git ls-files | grep -vxFf dist/left-out)
	@ls -l dist/comfyui-qwen-image-l40s.zip

clean:
	rm -rf $(VENV) .venv-newest build dist out *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An empty prerequisite that is never up to date.
rebuild:

ifneq "$(shell cat $(STAMP) 2>/dev/null)" "$(VENV_FOR) $(TORCH_FOR)"
$(STAMP): rebuild
endif

# torch goes in first, so that what depends on it takes the build that was asked for.
$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || \
		{ echo "make: there is no $(PYTHON): install Python 3.10 to 3.14, or name one with PYTHON=" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' || \
		{ echo "make: constraints.txt has no versions for $$("$(PYTHON)" --version 2>&1): name Python 3.10 to 3.14 with PYTHON=" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "make: $(PYTHON) cannot build a virtual environment: install python3-venv, or name another with PYTHON=" >&2; exit 1; }
	@test "$$(head -n 1 $@ 2>/dev/null)" = "$$VENV_FOR" || "$(PYTHON)" -m venv --clear $(VENV)
	@rm -f $@
	@echo "make: installing $(TORCH) and the packages of pyproject.toml into $(VENV)"
	@{ $(PIP) --constraint constraints.txt $(TORCH) && $(PIP) --constraint constraints.txt --editable '.[dev]'; } \
		>$(PIP_LOG) 2>&1 || \
		{ echo "make: pip ended with \"$$(sed -n '/Impossible/d; s/.*ERROR: //p' $(PIP_LOG) | tail -n 1)\":" \
		"$$TORCH_FOR and the versions of constraints.txt come from a package index: connect one that has them" \
		"(pip config set global.index-url), or name another torch with TORCH=; $(PIP_LOG) holds all that pip said" >&2; exit 1; }
	@printf '%s\n' "$$VENV_FOR" "$$TORCH_FOR" > $@

# Without it, as on a machine without an index, the tests that need it are skipped.
$(FRONTEND): | $(STAMP)
	@$(PIP) --no-deps --target $@ \
		comfyui-frontend-package==1.58.1 || echo "make: tests of the newer page are left out" >&2
