"""How fast and in how much memory a checkpoint is read into a mesh, against `dd` on its files.

A dense bfloat16 checkpoint is written (once, a Llama of a few gigabytes with random weights) and
read into 8 virtual CPU devices, every matrix cut along one axis. Reported: bytes per second of the
reader and of `dd` over the same files in turn, and the host memory beyond the parameters
themselves, which must stay near one parameter's size whatever the model's.
"""

import dataclasses
import os
import subprocess
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mimo_jax.checkpoint import name_map
from mimo_jax.checkpoint.hf_target import load_target, open_target, target_leaves
from mimo_jax.checkpoint.hf_target_config import target_config_to_json
from mimo_jax.config import GLOBAL, AttentionConfig, TargetConfig
from mimo_jax.sharding import DECODE, make_mesh
from mimo_jax.timing import Stopwatch

NUM_DEVICES = 8


def synthetic_config(num_layers: int) -> TargetConfig:
    """A Llama of 0.2 GB per layer in bfloat16, and 0.5 GB of embedding and head."""
    attention = AttentionConfig(
        num_heads=16, num_kv_heads=8, head_dim=128, v_head_dim=128, rope_theta=1e4, rope_dim=128
    )
    return TargetConfig(
        vocab_size=64000,
        hidden_size=2048,
        layer_kinds=(GLOBAL,) * num_layers,
        attention={GLOBAL: attention},
        dense_hidden_size=14336,
        tie_embeddings=False,
    )


def write_synthetic(directory: Path, num_layers: int) -> None:
    """Writes the checkpoint unless it is there; weights are random bits of one block, repeated."""
    if (directory / "config.json").is_file():
        return
    config = synthetic_config(num_layers)
    block = np.random.default_rng(0).normal(size=1 << 20).astype(jnp.bfloat16)
    flat = {}
    for leaf in target_leaves(config):
        # A view of one repeated block: the model is larger than this process should be.
        size = int(np.prod(leaf.shape))
        flat[leaf.name] = np.resize(block, min(size, block.size))
        if size > block.size:
            rows = leaf.shape[0]
            flat[leaf.name] = np.broadcast_to(
                np.resize(block, size // rows), (rows, size // rows)
            )
        flat[leaf.name] = flat[leaf.name].reshape(leaf.shape)
    name_map.write_model(
        directory,
        target_leaves(config),
        flat,
        dtype=jnp.bfloat16,
        json_files={"config.json": target_config_to_json(config, jnp.bfloat16)},
        max_shard_bytes=1 << 30,
    )


class _PeakMemory:
    """Highest anonymous memory of this process while it is open (mapped files do not count)."""

    def __init__(self):
        self.peak_bytes, self._stop = 0, threading.Event()

    def _anonymous_bytes(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        return 0

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, self._anonymous_bytes())

    def __enter__(self) -> "_PeakMemory":
        self.start_bytes = self._anonymous_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()


@dataclasses.dataclass(frozen=True)
class LoadFigures:
    """What one run measured.

    Attributes:
      file_bytes: Of all files.
      cold: Rates with the files dropped from the system's cache before each reading.
      warm: Rates with the files in memory, if there is room for them.
      largest_parameter_bytes: Of one parameter.
      host_bytes_beyond_parameters: Peak of this process's own memory minus the parameters.
    """

    file_bytes: int
    cold: "Rates"
    warm: "Rates"
    largest_parameter_bytes: int
    host_bytes_beyond_parameters: int


@dataclasses.dataclass(frozen=True)
class Rates:
    """Medians over the rounds of one state of the cache; ratio is that of the pairs, in turn."""

    load_bytes_per_s: float
    dd_bytes_per_s: float
    ratio: float


def _drop_from_cache(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _dd(files: list[Path]) -> None:
    for file in files:
        command = ["dd", f"if={file}", "of=/dev/null", "bs=4M"]
        subprocess.run(command, check=True, capture_output=True)


def measure_load(directory: Path, rounds: int = 3) -> LoadFigures:
    """Reads the checkpoint into 8 devices, in turn with dd, from a cold cache and from a warm one.

    Raises:
      ValueError: If there are not 8 devices.
    """
    if len(jax.devices()) < NUM_DEVICES:
        raise ValueError(
            f"{len(jax.devices())} devices; start with jax_num_cpu_devices={NUM_DEVICES}"
        )
    mesh = make_mesh(DECODE, (1, NUM_DEVICES))
    files = sorted(directory.glob("*.safetensors"))
    leaves = target_leaves(open_target(directory)[0])
    total = sum(int(np.prod(leaf.shape)) for leaf in leaves) * 2
    file_bytes = sum(file.stat().st_size for file in files)
    beyond, rates = [], {}
    for state in ("cold", "warm"):
        load_s, dd_s = [], []
        for _ in range(rounds):
            if state == "cold":
                _drop_from_cache(files)
            with Stopwatch() as watch:
                _dd(files)
            dd_s.append(watch.elapsed_s)
            if state == "cold":
                _drop_from_cache(files)
            with _PeakMemory() as memory, Stopwatch() as watch:
                loaded = load_target(directory, mesh=mesh, is_transposed=True)
            load_s.append(watch.elapsed_s)
            beyond.append(memory.peak_bytes - memory.start_bytes - total)
            del loaded
        rates[state] = Rates(
            load_bytes_per_s=file_bytes / float(np.median(load_s)),
            dd_bytes_per_s=file_bytes / float(np.median(dd_s)),
            ratio=float(np.median(np.divide(dd_s, load_s))),
        )
    return LoadFigures(
        file_bytes=file_bytes,
        cold=rates["cold"],
        warm=rates["warm"],
        largest_parameter_bytes=max(int(np.prod(leaf.shape)) for leaf in leaves) * 2,
        host_bytes_beyond_parameters=int(max(beyond)),
    )
