# Each target is enough by itself: it makes .venv and installs what it needs.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check -qq
READY := .venv/.installed
READY_FOR_DOCS := .venv/.installed-docs

.PHONY: help demo test test-all lint docs dist pythons
.SILENT:

help:
	echo "make demo     two sites learn ten digits together, six ways, in one table"
	echo "make test     the tests that are not slow; make test-all: the slow ones, too;"
	echo "              OUTERGRAD_LONG=1 make test-all: every combination, and long trainings"
	echo "make lint     style, types and the direction of imports"
	echo "make pythons  whether other supported Pythons of this machine run it"
	echo "make docs     README and docs/ as a site that can be searched, in site/"
	echo "make dist     a wheel in dist/, for machines without a checkout; needs no .venv"
	echo
	echo "PYTHON=python3.12 chooses the interpreter for .venv (now: $(PYTHON))"

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m outergrad_lab.demo

# Tests start some hundred processes, which need not compile the packages again. Many wait for
# timeouts: on two cores three workers keep these busy.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal -m "not slow"

test-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal -m "not alone"
	OMP_NUM_THREADS=1 $(BIN)/pytest -m alone $$(grep -rl --include='*.py' mark.alone tests)

lint: $(READY)
	$(BIN)/ruff check --no-cache # a cached answer does not know that a module has moved
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

pythons: $(READY)
	.ci/pythons

# Warnings are errors: a link that leads nowhere, a page that is missing.
docs: $(READY_FOR_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	echo "site/index.html"

# A wheel of this checkout alone, by an environment that goes again: whoever runs a hub or a site
# needs neither the tests' packages nor a .venv.
dist:
	rm -f dist/outergrad-*.whl
	builder=$$(mktemp -d) && trap 'rm -rf "$$builder"' EXIT && \
	$(PYTHON) -m venv $$builder && \
	$$builder/bin/pip --disable-pip-version-check -q wheel --no-deps --wheel-dir dist .
	wheel=$$(ls dist/outergrad-*.whl) && echo "$$wheel" && \
	echo "where it is to run: pip install './$${wheel##*/}[cli,star]'"

# The pinned torch comes first: a looser request would download gigabytes. timm and MONAI come
# without what they ask for: the wheel of torchvision beside a torch for CPUs breaks the imports of
# transformers and lightning.
$(READY): pyproject.toml constraints.txt
	echo "installing into .venv, once: some minutes"
	echo "1 of 4: a virtual environment of $(PYTHON)"
	$(PYTHON) -m venv .venv
	echo "2 of 4: PyTorch, the largest part"
	$(PIP) install -c constraints.txt torch==2.13.0
	echo "3 of 4: outergrad, and what the demo, reports and tests need, some hundred packages"
	$(PIP) install -c constraints.txt -e '.[dev]'
	echo "4 of 4: timm and MONAI, for tests with models of others"
	$(PIP) install -c constraints.txt --no-deps timm monai
	touch $@

$(READY_FOR_DOCS): $(READY)
	$(PIP) install -c constraints.txt -e '.[docs]'
	touch $@
