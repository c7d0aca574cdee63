"""The check of one GPU, run small on a CPU: parts that fail, the report, a device's share.

Run: .venv/bin/python -m pytest tests/bench/test_gpu_check.py

Each part is a process (about 5 s); the whole toy run is a slow test.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mimo_jax.bench.gpu_check import kernel_check, kernels, run, shard
from mimo_jax.bench.gpu_check.__main__ import main
from mimo_jax.bench.gpu_check.parts import FAILED, LEFT_OUT, OK, TIMED_OUT
from mimo_jax.bench.gpu_check.report import extrapolate, to_markdown
from mimo_jax.bench.gpu_check.settings import PARTS, GpuCheck, Part
from mimo_jax.config import DrafterConfig
from mimo_jax.decode.placement import shapes_on_mesh
from mimo_jax.models.params import flatten
from mimo_jax.plan.devices import DEVICES
from mimo_jax.plan.published import read_config
from mimo_jax.sharding import DECODE, make_mesh
from tests.groups import environment

BAD = "tests.bench.stand_in_parts"


@pytest.fixture
def children(monkeypatch):
    """Children find the compile cache of this test run."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def test_a_bad_part_ends_alone(children, monkeypatch, tmp_path: Path):
    parts = (
        Part("fails", f"{BAD}:fails", None, 60.0),
        Part("hangs", f"{BAD}:hangs", None, 8.0),
        Part("dies", f"{BAD}:dies", "argued", 60.0),
        Part("rates", "mimo_jax.bench.gpu_check.rates:measure_rates", None, 60.0),
    )
    monkeypatch.setattr(run, "PARTS", parts)
    lines = []
    report = run.run(GpuCheck("toy", tmp_path), lines.append)
    assert report == json.loads((tmp_path / "report.json").read_text())
    statuses = {name: part["status"] for name, part in report["parts"].items()}
    assert statuses == {"fails": FAILED, "hangs": TIMED_OUT, "dies": FAILED, "rates": OK}
    # What was known before the end is kept.
    begun = [report["parts"][name]["figures"] for name in ("fails", "hangs", "dies")]
    assert begun == [{"begun": "toy"}, {"begun": "toy"}, {"begun": "argued"}]
    assert report["parts"]["fails"]["error"] == "ValueError: the third row is wrong"
    assert report["parts"]["hangs"]["error"] == "not done after 8 s"
    assert report["parts"]["rates"]["figures"]["copy_gb_per_s"] > 0
    assert lines[0].endswith("s: ValueError: the third row is wrong")
    text = (tmp_path / "report.md").read_text()
    assert "Not all parts are done: fails, hangs, dies." in text


def test_what_no_longer_fits_is_left_out(tmp_path: Path):
    report = run.run(GpuCheck("toy", tmp_path, seconds=9.0, only=("rates",)), lambda line: None)
    assert report["parts"]["rates"]["status"] == LEFT_OUT
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["report.json", "report.md"]


def test_an_unknown_part_is_named(capsys, tmp_path: Path):
    assert main(["--only", "speed", "--out", str(tmp_path)]) == 2
    names = ", ".join(part.name for part in PARTS)
    assert capsys.readouterr().err == f"error: part 'speed' is unknown; allowed: {names}\n"


def test_two_parts_run_on_a_cpu(children, capsys, tmp_path: Path):
    names = ["rates", "steps, xla"]
    code = main(["--size", "toy", "--out", str(tmp_path), "--only", *names])
    report = json.loads((tmp_path / "report.json").read_text())
    assert code == 0, capsys.readouterr().out
    assert list(report["parts"]) == names
    steps = report["parts"]["steps, xla"]["figures"]["steps"]
    assert set(steps) == {"plain", "dflash"}
    # The share of 2 sparse layers: 16 experts, an eighth of 1024 wide, 17 bits per 4 weights.
    experts_gb = 2 * 16 * 3 * 256 * 128 * 17 / 32 / 1e9
    assert experts_gb < steps["plain"]["weights_gb"] < steps["dflash"]["weights_gb"] < 0.01
    assert "extrapolated" not in report, "toy figures mean nothing on eight GPUs"
    assert "All parts are done." in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_the_whole_toy_run(children, tmp_path: Path):
    main(["--size", "toy", "--seconds", "2400", "--out", str(tmp_path)])
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert list(parts) == [part.name for part in PARTS]
    assert not any(part["status"] in (TIMED_OUT, LEFT_OUT) for part in parts.values())
    for way in ("xla", "kernels"):
        assert {"sliding_layer_ms", "global_layer_ms"} <= set(parts[f"layers, {way}"]["figures"])
        assert set(parts[f"steps, {way}"]["figures"]["steps"]) == {"plain", "dflash"}
    found = parts["kernels"]["figures"]["kernels"]
    assert list(found) == [
        "fp8_matmul, normed", "dense_matmul, normed", "sink_attention, ring",
        "router_top_k, small", "swiglu_experts, small",
    ]  # fmt: skip
    assert all(row["is_right"] and row["relative_error"] < 5e-3 for row in found.values())


def test_needs_only_jax_flax_numpy_and_jaxtyping():
    blocked = ["tyro", "orbax", "tokenizers", "safetensors", "matplotlib", "jinja2", "transformers"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "import mimo_jax.bench.gpu_check.__main__, mimo_jax.bench.gpu_check.shard"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]


# --- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", kernels.CHECKS, ids=lambda check: check.name)
def test_kernels_take_what_is_drawn_for_them(check):
    """Traced at every shape of both sizes: the kernel and its reference give the same array."""
    for specs in check.specs.values():
        for name, spec in specs.items():
            drawn = jax.eval_shape(lambda key, spec=spec: check.draw(key, spec), jax.random.key(0))
            shapes = [
                jax.eval_shape(
                    lambda arrays, one=one, spec=spec: check.call(arrays, spec, one), drawn
                )
                for one in ("xla", "mosaic_gpu")
            ]
            assert shapes[0] == shapes[1], name
            jax.eval_shape(lambda arrays, spec=spec: check.rival(arrays, spec), drawn)


def test_wrong_and_broken_kernels_are_seen(monkeypatch):
    def scaled(arrays, spec, implementation):
        out = arrays["x"] * jnp.bfloat16(spec)
        return out if implementation == "xla" else out * jnp.bfloat16(1.02)

    def broken(arrays, spec, implementation):
        out = scaled(arrays, spec, "xla")
        return out if implementation == "xla" else out.at[0].set(jnp.nan)

    def refuses(arrays, spec, implementation):
        raise ValueError("one line\nand another")

    draw = lambda key, spec: {"x": jax.random.normal(key, (64,), jnp.bfloat16)}
    rival = lambda arrays, spec: arrays["x"]
    checks = [
        kernel_check.KernelCheck(
            call.__name__, {"toy": {"s": 3}}, draw, call, rival, lambda spec: 128.0,
            lambda spec: 64.0,
        )
        for call in (scaled, broken, refuses)
    ]  # fmt: skip
    monkeypatch.setattr(kernels, "CHECKS", checks)
    noted = {}
    kernels.check_kernels("toy", noted.update)
    rows = noted["kernels"]
    assert rows["scaled, s"]["relative_error"] == pytest.approx(0.02, abs=4e-3)
    assert not rows["scaled, s"]["is_right"]
    assert not rows["broken, s"]["is_right"]
    assert rows["refuses, s"]["error"] == "ValueError: one line"
    row = rows["scaled, s"]
    assert row["kernel_gb_per_s"] == pytest.approx(128 / row["kernel_us"] / 1e3)
    assert row["xla_gb_per_s"] == pytest.approx(64 / row["xla_us"] / 1e3)


# --- a device's share ----------------------------------------------------------------------------


@pytest.fixture
def zeros(monkeypatch):
    """Weights of zeros: shapes alone matter."""
    monkeypatch.setattr(shard, "_draw", lambda key, *, shape, dtype, kind: jnp.zeros(shape, dtype))


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_a_share_is_what_one_of_eight_devices_holds(which, zeros):
    config = getattr(shard.model_of("toy"), which)
    share = shard.random_share(config, make_mesh(DECODE, (1, 1)), seed=0)
    whole = flatten(shapes_on_mesh(config, make_mesh(DECODE, (1, 8))).params)
    found = {name: leaf.shape for name, leaf in flatten(share.params).items()}
    assert found == {n: leaf.sharding.shard_shape(leaf.shape) for n, leaf in whole.items()}
    if isinstance(config, DrafterConfig):
        assert found["w_fuse"] == (256 // 8, 256)
    else:
        assert found["layers.1.experts_gate"] == (16, 1024 // 8, 256 // 2)


def test_the_ring_holds_the_newest_positions(zeros):
    mesh = make_mesh(DECODE, (1, 1))
    target = shard.random_share(shard.model_of("toy").target, mesh, seed=0)
    state = shard.running_state(shard.Engine(target, None, max_len=256), 150)
    positions = state.target_cache.ring_positions
    assert positions is not None
    # 150 tokens are committed, the last is the anchor: memory ends at 148. A ring of 136 slots.
    assert int(positions.max()) == 148
    assert [int(positions[0, slot]) for slot in (0, 12, 13, 135)] == [136, 148, 13, 135]
    assert int(positions[0, 136]) == -1


def test_short_models_differ_by_sparse_layers_of_one_kind():
    found = shard.short_models(shard.model_of("pro"), 4)
    kinds = {name: model.target.layer_kinds for name, model in found.items()}
    assert kinds["base"] == ("global", "sliding")
    assert kinds["sliding"] == ("global", *["sliding"] * 5)
    assert kinds["global"] == ("global", "sliding", *["global"] * 4)
    assert found["global"].target.is_moe_layer == (False, *[True] * 5)


# --- the report ----------------------------------------------------------------------------------


def test_extrapolation_adds_the_all_reduces():
    model = read_config(shard.CONFIG)
    steps = {"plain": {"step_ms": 2.0}, "dflash": {"step_ms": 3.0}}
    found = extrapolate(steps, model, DEVICES["h200"], 8)
    # 142 and 155 all-reduces of 5 us; 7 neighbours' rows of 12,288 bytes at 450 GB/s: one, eight.
    plain_ms = 142 * (5e-3 + 12_288 * 7 / 450e6)
    dflash_ms = 155 * (5e-3 + 8 * 12_288 * 7 / 450e6)
    assert found["plain"]["all_reduces_ms_estimated"] == pytest.approx(plain_ms)
    assert found["dflash"]["all_reduces_ms_estimated"] == pytest.approx(dflash_ms)
    assert found["plain"]["tokens_per_s"] == {"any text": pytest.approx(1e3 / (2.0 + plain_ms))}
    assert found["dflash"]["tokens_per_s"]["code"] == pytest.approx(1570, abs=1)


def test_markdown_of_a_report():
    steps = {"plain": {"step_ms": 2.0}, "dflash": {"step_ms": 3.0}}
    rates = {"machine": {"device": "some GPU", "jax": "9.9"}, "read_gb_per_s": 4180.0}
    row = {"relative_error": 0.00123, "is_right": False, "kernel_us": 6.25, "kernel_gb_per_s": 3344}
    model, device = read_config(shard.CONFIG), DEVICES["h200"]
    part = lambda figures, **more: {"status": OK, "seconds": 4.6, "figures": figures} | more
    text = to_markdown(
        {
            "command": "python -m x", "date": "2026-11-30", "revision": "abc",
            "extrapolation": run.EXTRAPOLATION,
            "parts": {
                "rates": part(rates),
                "kernels": part({"kernels": {"some kernel": row}}),
                "layers, xla": part({"sliding_layer_ms": {"plain": 0.02, "dflash": 0.05}}),
                "steps, xla": part({"steps": steps}, status=TIMED_OUT, error="late"),
            },
            "extrapolated": {"steps, xla": extrapolate(steps, model, device, 8)},
        }
    )  # fmt: skip
    for line in (
        "device some GPU, jax 9.9.",
        "Memory: copy - GB/s (read plus written), sum 4,180 GB/s (read).",
        "| steps, xla | timed out | 5 | late |",
        "| some kernel | **NO** | 1.2e-03 | 6.2 | 3,344 | 80% | - | - |",
        "| layers, xla | one more sliding layer | 0.020 | 0.050 |",
        "| steps, xla | a whole step | 2.000 | 3.000 |",
        "## Extrapolated to eight GPUs: not measured",
        "| steps, xla | dflash | code | 4.012 | 1.012 | 1,570 |",
        "Not all parts are done: steps, xla.",
    ):
        assert line in text.splitlines(), line
