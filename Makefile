# Everything a developer runs. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
ENGINE := $(BIN)/python tools/with_engine.py --
LOCK := uv pip compile pyproject.toml --all-extras --universal --generate-hashes --no-emit-index-url --no-header --quiet

include tests/cluster/cluster.mk

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/.installed: requirements.lock pyproject.toml tools/build_guest.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

.PHONY: venv
venv: $(VENV)/.installed ## the virtual environment with the locked dependencies

.PHONY: guest
guest: venv ## build sandbox-init for amd64 and arm64
	$(BIN)/python tools/build_guest.py

.PHONY: demo
demo: guest ## the whole story on a real project, with an engine of its own when none answers
	$(ENGINE) $(BIN)/python demo/run.py

.PHONY: serve
serve: guest ## run the facade on the Docker engine (settings: AGENT_SANDBOX_*)
	$(ENGINE) $(BIN)/sandboxctl serve

.PHONY: lint
lint: venv ## ruff, mypy, import-linter, go vet, staticcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd init && test -z "$$(gofmt -l cmd internal)" && go vet ./... && GOFLAGS=-mod=mod go run $(STATICCHECK) ./...

.PHONY: test-go
test-go: ## the guest's own tests
	cd init && go test ./...

.PHONY: test-unit
test-unit: guest ## tests that need no engine
	$(BIN)/pytest tests/unit
	$(BIN)/pytest tests/cli --backends memory

.PHONY: test-docker
test-docker: guest ## contract, faults and engine tests on a real Docker engine
	$(ENGINE) $(BIN)/pytest tests/contract tests/backends tests/e2e

.PHONY: test
test: test-go test-unit test-docker test-cluster ## everything; installs or starts what it needs

.PHONY: bench
bench: guest ## measure side by side; writes docs/figures.md
	$(ENGINE) $(BIN)/python -m tests.bench

.PHONY: lock
lock: ## refresh both lock files from pyproject.toml
	$(LOCK) --group dev --upgrade --output-file requirements.lock
	$(LOCK) --group build --constraint requirements.lock --output-file requirements-server.lock

.PHONY: images
images: guest ## the container images, by buildah, without a registry
	$(BIN)/python tools/build_images.py

.PHONY: crds
crds: venv ## write crds/ and the chart's copy from the models
	$(BIN)/python tools/build_crds.py
