# Every target works alone on a fresh clone: whatever needs the environment depends on $(READY).
# A line here is one that a person could type.

PY := .venv/bin/python
READY := .venv/.setup-done

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-oldest lint format bench notebooks train-demo \
	train-smoke clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## build .venv with a Python >= 3.12 (PYTHON=... to choose it)

demo: $(READY)  ## draft, verify and commit with the bundled model, on this CPU
	$(PY) -m mimo_jax.demo

test: lint  ## lint, then the default tests (PYTEST_ARGS=... for more)
	$(PY) -m pytest $(PYTEST_ARGS)

test-slow: $(READY)  ## the tests that take minutes
	$(PY) -m pytest -m "slow and not gpu and not tpu" $(PYTEST_ARGS)

lint: $(READY)  ## ruff and pyright
	$(PY) -m ruff check
	$(PY) -m pyright

format: $(READY)  ## rewrite the sources in the house style
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

bench: $(READY)  ## measure decoding: tokens per second and accept length
	$(PY) -m mimo_jax.bench decode

notebooks: $(READY)  ## execute every notebook
	$(PY) -m pytest -m notebooks $(PYTEST_ARGS)

train-demo: $(READY)  ## train the small target and its drafter
	$(PY) train.py --config configs/qat_nano.py

train-smoke: $(READY)  ## the same run, shortened to show that it works
	$(PY) train.py --config configs/nano_smoke.py

$(READY): pyproject.toml .ci/setup_env.sh .ci/find_python.sh
	sh .ci/setup_env.sh .venv
	@touch $@

# Not part of `test`: it builds a second environment, with the oldest versions we promise.
test-oldest:  ## the default tests on Python 3.12 with jax 0.11.2
	sh .ci/setup_env.sh .cache/venv-oldest 3.12 jax==0.11.2
	.cache/venv-oldest/bin/python -m pytest $(PYTEST_ARGS)

clean:  ## remove caches and build leftovers; keeps .venv, runs/ and out/
	rm -rf .cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
