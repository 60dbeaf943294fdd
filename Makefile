# Everything a developer or a stranger types. `make demo` and `make test` do all set-up themselves.
SHELL := /bin/bash
.DEFAULT_GOAL := help

BIN := .venv/bin
PACKAGES := dsec_cli dsec_linux dsec_store erofs_tools runtimes

.PHONY: help setup setup-test demo test soak bench lint format clean

help:
	@echo "make demo    build, publish, compose, run and pack real layers, beside downloading and unpacking a tar"
	@echo "make test    all tests (at most 15 minutes); make soak: with the large counts"
	@echo "make bench   the benchmarks; results in build/bench"
	@echo "make setup   what demo needs; the other targets do it themselves"
	@echo "make lint    ruff, mypy, import-linter; make clean: removes .venv and build"

setup:
	@tools/setup run

setup-test:
	@tools/setup test

demo: setup
	@$(BIN)/python -m bench.demo

test: setup-test
	@$(BIN)/python -m pytest -m "not soak"

soak: setup-test
	@$(BIN)/python -m pytest --timeout 7200

bench: setup
	@$(BIN)/python -m bench

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy bench tests
	$(BIN)/lint-imports

format: setup-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
