# Everything runs in .venv, which the first target that needs it creates from requirements.lock.
# After that no target needs the network, except lock and wheels. ARGS is passed on: make ladder ARGS="--sizes 256,1024"

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SITE_STAMP := $(VENV)/.site
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11
NEW_ENOUGH := 'import sys; sys.exit(sys.version_info < (3, 11))'
PIP := $(PYTHON) -m pip --quiet --disable-pip-version-check
# One process more than cores, because tests wait for processes of theirs; at most 8, because each collects every test.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((cores < 8 ? cores + 1 : 8)))

# Without .pyc files pytest rewrites the assertions of every test in each run, and every process compiles gemmery.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup ladder bench test test-library test-all test-arm test-gpu sanitize check types documents docs site site-check serve wheels format lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(STAMP) ## create .venv with the packages of requirements.lock and gemmery

ladder: $(STAMP) ## run every rung and time it with NumPy, then the GPU rungs on the emulator; ARGS choose another ladder
	@$(PYTHON) -m gemmery ladder $(ARGS)
	@test -n "$(ARGS)" || $(PYTHON) -m gemmery ladder --device emulator --sizes 128

bench: $(STAMP) ## run the benchmark suites against the rival libraries; records go to your data folder
	@$(PYTHON) -m gemmery bench $(ARGS)

test: $(STAMP) ## run a sample of the cases of every test; every case if ARGS names files
	@$(PYTHON) -m pytest -n $(WORKERS) --few $(ARGS)

test-library: $(STAMP) ## run the tests of packages/gemmery, without those that start processes or compile CUDA C++
	@$(PYTHON) -m pytest -n $(WORKERS) --few -m "not process and not compiler" packages/gemmery/tests $(ARGS)

test-all: $(STAMP) ## run every case of every test
	@$(PYTHON) -m pytest -n $(WORKERS) $(ARGS)

test-arm: $(STAMP) ## run tests of the CPU's kernels and the API on aarch64, emulated by QEMU; ARGS="--cpu neoverse-n1 -- TESTS" chooses
	@$(PYTHON) tests/arm.py $(ARGS)

test-gpu: $(STAMP) ## run the tests that need a CUDA device
	@$(PYTHON) -m pytest -n 8 -m gpu $(ARGS)

sanitize: $(STAMP) ## run every GPU rung under the tools of compute-sanitizer
	@for tool in memcheck racecheck initcheck synccheck; do \
	  echo "$$tool"; \
	  $(PYTHON) packages/gemmery/tests/shared/sanitized.py --names | xargs -n 1 -P 8 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(PYTHON) packages/gemmery/tests/shared/sanitized.py || exit 1; done

check: $(STAMP) ## check format, lint, types, layering, documentation
	@$(PYTHON) -m ruff format --check
	@$(PYTHON) -m ruff check
	@$(MAKE) --no-print-directory --jobs 2 types documents

# The two steps of check that take long: it runs them side by side.
types:
	@$(PYTHON) -m mypy

documents:
	@$(PYTHON) -m pytest -q -p no:cacheprovider tests/test_layering.py tests/test_docs.py

docs: $(STAMP) ## regenerate what is generated in the documents, write docs/results.md, list stale translations
	@$(PYTHON) -m site_pages.documents
	@$(PYTHON) -m site_pages.pictures
	@$(PYTHON) -m site_pages.translations

site: $(STAMP) $(SITE_STAMP) ## build the documentation site in site/
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m site_pages

site-check: site ## build the site, and check its links and how it looks
	@$(PYTHON) -m pytest -q tests/test_site_built.py

serve: ## show the site at http://localhost:8000, built first if it is not there; ARGS is another port
	@test -e site/index.html || $(MAKE) --no-print-directory site
	@$(PYTHON) -m http.server --bind localhost --directory site $(or $(ARGS),8000)

wheels: $(STAMP) ## build the three packages in dist/, and run tests of the checkout's source distribution on the wheels
	@rm -rf dist && mkdir -p dist/unpacked
	@for package in packages/*; do $(PYTHON) -m uv build --quiet --out-dir dist $$package || exit 1; done
	@$(PYTHON) -m uv build --quiet --sdist --out-dir dist/checkout
	@tar -xzf dist/checkout/gemmery-*.tar.gz -C dist/unpacked --strip-components 1
	@$(PYTHON) -m venv dist/venv
	@dist/venv/bin/python -m pip --quiet install --only-binary :all: --require-hashes --requirement requirements.lock
	@dist/venv/bin/python -m pip --quiet install --no-deps dist/*.whl
	@cd dist/unpacked && ../venv/bin/python -m pytest -q -n 2 \
	  $(or $(ARGS),tests/test_packaging.py tests/test_docs.py tests/test_import.py packages/gemmery/tests/api/test_api.py packages/gemmery/tests/api/test_api_out.py packages/gemmery/tests/api/test_api_wrong_arguments.py packages/gemmery-lab/tests/cli/test_cli.py packages/gemmery-emulator/tests/kernels/test_emulation.py)

format: $(STAMP) ## format the source, and fix what can be fixed automatically
	@$(PYTHON) -m ruff check --fix
	@$(PYTHON) -m ruff format

lock: $(STAMP) ## regenerate requirements.lock and requirements-docs.lock from pyproject.toml; ARGS=--upgrade takes newer versions
	@$(PYTHON) -m uv pip compile pyproject.toml --extra lab --extra cuda --group dev --universal --python-version 3.11 \
	  --fork-strategy fewest --generate-hashes --no-header --no-annotate --no-emit-index-url --quiet \
	  --output-file requirements.lock $(ARGS)
	@$(PYTHON) -m uv pip compile --group docs --constraints requirements.lock --universal --python-version 3.11 \
	  --fork-strategy fewest --generate-hashes --no-header --no-annotate --no-emit-index-url --quiet \
	  --output-file requirements-docs.lock $(ARGS)

clean: ## remove caches and pages, but not .venv
	rm -rf out site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find packages tests examples -name __pycache__ -prune -exec rm -rf {} +

# A .venv whose Python is missing is created again.
ifneq ($(shell $(PYTHON) -c 'import pip' 2>/dev/null && echo works),works)
.PHONY: $(STAMP)
endif

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import pip' 2>/dev/null || { \
	  for found in $(CANDIDATES) ""; do "$$found" -c $(NEW_ENOUGH) 2>/dev/null && break; done; \
	  test -n "$$found" || { echo "gemmery needs Python 3.11 or newer on the PATH and found none: install one" >&2; exit 1; }; \
	  "$$found" -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "$$found lacks venv and ensurepip: install them (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	  echo "creating $(VENV) with $$("$$found" --version)"; \
	  "$$found" -m venv --clear $(VENV); }
	@echo "installing requirements.lock into $(VENV)"
	@$(PIP) install --only-binary :all: --require-hashes --requirement requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(SITE_STAMP): $(STAMP) requirements-docs.lock
	@echo "installing requirements-docs.lock into $(VENV)"
	@$(PIP) install --only-binary :all: --require-hashes --requirement requirements-docs.lock
	@touch $@
