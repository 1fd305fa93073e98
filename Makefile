# Everything runs in .venv, which the first target that needs it creates.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all check release clean
.PRECIOUS: $(VENV)/.%
.DELETE_ON_ERROR:

demo: $(VENV)/.core
	$(BIN)/txl demo

# Tests start a hundred processes, which would each compile the package's code anew.
test test-all: export PYTHONDONTWRITEBYTECODE :=

test: check
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not outside and not rehearsal"

# All examples, the site, the examples and the release; also checks the shapes and types of all arguments, which doubles the time.
test-all: $(VENV)/.dev check
	TXL_ALL_EXAMPLES=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -m "not rehearsal" --jaxtyping-packages=transformer_xl,shapes.check

.PHONY: docs
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html. The search needs a server: python3 -m http.server --directory build/site"

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	PYTHONPATH=. PATH="$(CURDIR)/$(BIN):$$PATH" pyright --verifytypes transformer_xl --ignoreexternal > $(VENV)/types.txt \
		|| { grep -B 1 error $(VENV)/types.txt; false; }

release: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	.ci/smoke dist/*.whl

clean:
	rm -rf $(VENV) dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# With the extra of this name: .docs, .test or .dev, which holds the others; .core has none.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); the first time this takes a minute or more."
	$(INSTALL) -e '.$(if $(filter core,$*),,[$*])'
	touch $@ $(VENV)/.core $(if $(filter dev,$*),$(VENV)/.test $(VENV)/.docs)
