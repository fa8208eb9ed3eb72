.PHONY: install demo test test-all lock clean

PYTHON = .venv/bin/python

install: .venv/.installed

.venv/.installed: requirements.lock pyproject.toml scripts/bootstrap.sh
	bash scripts/bootstrap.sh

demo: install
	.venv/bin/mmrl train configs/vision/read_digits.yaml --overwrite

test: install
	$(PYTHON) -m pytest

test-all: install
	$(PYTHON) -m pytest -m "slow or not slow"

clean:
	rm -rf .venv build *.egg-info

lock:
	uv pip compile --universal --upgrade --extra dev --extra tensorboard --no-header --no-annotate pyproject.toml -o requirements.lock
