# make setup   a virtual environment in .venv with the package and its checks; repeated only when what it depends on changes
# make demo    predict a training step of ResNet-50 on an H200
# make lint    ruff, mypy
# make test    lint, then the tests
# make clean   remove the environment and what tools left behind

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp-setup
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: setup demo lint test clean
.DELETE_ON_ERROR:

setup: $(STAMP)

# torchvision and timm come without their dependencies: theirs would pull in another build of torch
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("paceline needs Python 3.11 or later, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11")'
	@echo "setting up .venv, which takes a few minutes the first time"
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) --constraint constraints.txt --editable '.[hf,emulate,plots,ray,web]' --group dev pillow
	$(PIP) --constraint constraints.txt --no-deps torchvision timm
	@touch $@

demo: setup
	$(BIN)/paceline predict resnet50 --device h200 --batch 128 --precision amp_bf16

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
