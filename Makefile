# Everything a person types. `make` alone lists it.
# CLUSTER names the test cluster, PROVIDER says how to make it: kind, local, current; auto takes what works here.
# SUITE and ARGS narrow `make test`.

SHELL := /bin/bash
.DEFAULT_GOAL := help

BIN := .venv/bin
# The programs of kind/ run on the python3 of .venv.
export PATH := $(CURDIR)/$(BIN):$(PATH)
CLUSTER ?=
PROVIDER ?= auto
SUITE ?=
ARGS ?=

ifneq ($(CLUSTER),)
export LLMTRAIN_CLUSTER := $(CLUSTER)
endif

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## make .venv from constraints.txt (quick when nothing changed)
	@hack/setup

.PHONY: demo
demo: setup ## watch a job survive a killed rank, a deleted pod and a deleted operator
	@$(BIN)/python kind/demo

.PHONY: test
test: setup ## run every suite, or SUITE="unit chart"; ARGS="-k name" goes to pytest
	@$(BIN)/python hack/test $(SUITE) -- $(ARGS)

.PHONY: gpu-check
gpu-check: setup ## check on one GPU, in under 5 minutes, what no CPU can; says so where there is none
	@$(BIN)/python -m hack.gpu_check $(ARGS)

.PHONY: soak
soak: setup ## run the long tests
	@$(BIN)/python hack/test soak -- $(ARGS)

.PHONY: lint
lint: setup ## style, formatting, import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

.PHONY: fmt
fmt: setup ## format, and fix what ruff can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: type
type: setup ## mypy, strict
	$(BIN)/mypy

.PHONY: generate
generate: setup ## write the CRD, its copy in the chart and the API reference from the types
	$(BIN)/python -m llmtrain_api.generate

.PHONY: generate-check
generate-check: setup ## fail when a generated file is not what the types say
	$(BIN)/python -m llmtrain_api.generate --check

.PHONY: verify
verify: lint type generate-check test ## everything CI runs

.PHONY: cluster-up
cluster-up: setup ## start the test cluster
	@kind/cluster up --provider $(PROVIDER)

.PHONY: cluster-down
cluster-down: setup ## stop the test cluster and leave nothing behind
	@kind/cluster down

.PHONY: images
images: setup ## build the operator's and the trainer's image
	@kind/images-build

.PHONY: lock
lock: ## rewrite constraints.txt from pyproject.toml; ARGS="--upgrade" takes newer versions
	@hack/lock $(ARGS)

.PHONY: clean
clean: ## remove what builds and tests made here (.venv stays)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
