"""Sizes and times from configurations, against published figures and by hand.

Run: .venv/bin/python -m pytest tests/plan/test_account.py

Nothing is compiled here. Goldens come from the published repositories (sizes, counts) and from
arithmetic written beside them.
"""

import dataclasses
import math

import pytest

from configs import tiny
from mimo_jax.config import ConfigError
from mimo_jax.plan import roofline, weights
from mimo_jax.plan.account import (
    LAUNCHES,
    MEMORY,
    SHARDING,
    as_json,
    jobs,
    make_plan,
    make_request,
)
from mimo_jax.plan.caches import cache_bytes
from mimo_jax.plan.checks import anchors
from mimo_jax.plan.devices import DEVICES, find_device
from mimo_jax.plan.placement import placements
from mimo_jax.plan.published import PublishedModel, StorageFormats, read_config
from mimo_jax.plan.verdict import judge
from mimo_jax.quant.kv import FORMATS
from mimo_jax.sharding import DECODE, TRAIN
from tests.checkpoint import pro_headers

EIGHT = {"data": 1, "model": 8}
CONFIGS = (
    "target_mimo_v2_flash",
    "target_mimo_v25",
    "target_mimo_v26_flash",
    "target_mimo_v25_pro",
    "drafter_mimo_v25",
    "drafter_mimo_v25_pro",
    "drafter_qwen3_8b",
    "drafter_llama31_8b",
)


@pytest.fixture(scope="module")
def pro() -> PublishedModel:
    return read_config("configs/drafter_mimo_v25_pro.py")


@pytest.fixture(scope="module")
def pro_rows(pro):
    return weights.weigh(pro, DECODE, EIGHT)


@pytest.mark.parametrize("name", CONFIGS)
def test_published_figures_hold(name):
    model = read_config(f"configs/{name}.py")
    found = anchors(model, weights.weigh(model, DECODE, {"data": 1, "model": 1}))
    assert all(check.holds for check in found), found
    assert found or "llama" in name or "26" in name, "no figure is known of this model"


def test_the_pro_takes_570_gb(pro_rows):
    gb = {kind: row.file_bytes / 1e9 for kind, row in pro_rows.items()}
    assert gb[weights.EXPERTS] == pytest.approx(531.35, abs=0.005)
    without = weights.file_bytes(pro_rows, weights.MTP, weights.DRAFTER) / 1e9
    assert without == pytest.approx(561.50, abs=0.005)
    assert sum(gb.values()) == pytest.approx(569.50, abs=0.005)


def test_the_files_account_agrees_with_the_published_headers(pro_rows):
    """Tensor by tensor; fused qkv has a few more scale rows than whole blocks would."""
    whole = sum(
        math.prod(shape) * pro_headers.ITEM_BYTES[dtype]
        for _, dtype, shape in pro_headers.tensors()
    )
    ours = weights.file_bytes(pro_rows, weights.DRAFTER)
    assert ours == pytest.approx(whole, rel=1e-6)


def test_mtp_heads_and_drafter_to_the_byte(pro_rows):
    assert pro_rows[weights.MTP].num_weights == 3 * 644_905_088
    v25 = read_config("configs/drafter_mimo_v25.py")
    rows = weights.weigh(v25, DECODE, {"data": 1, "model": 1})
    assert rows[weights.MTP].num_weights == 3 * 329_273_408
    assert rows[weights.DRAFTER].file_bytes == 2_936_114_304
    assert pro_rows[weights.EXPERTS].num_weights == 69 * 384 * 3 * 6144 * 2048


def test_the_program_holds_what_the_files_hold(pro_rows):
    """Codes of 4 and 8 bits with their scales; the scales of half blocks are whole ones."""
    experts, attention = pro_rows[weights.EXPERTS], pro_rows[weights.ATTENTION]
    assert experts.program_bytes == experts.file_bytes == 531_351_207_936
    # 70 layers of [27136, 6144]: 8 chunks of 26.5 blocks have 27 rows of scales each, 48 wide.
    half_blocks = 70 * 8 * 48 * 4 // 2
    assert attention.program_bytes == attention.file_bytes + half_blocks == 25_766_415_360
    dense = pro_rows[weights.DENSE]
    assert dense.program_bytes == dense.file_bytes
    assert experts.device_bytes * 8 == experts.program_bytes
    # The router is not cut: every device has all of it, in float32.
    router = pro_rows[weights.ROUTER]
    assert router.device_bytes == router.program_bytes == 4 * 69 * 384 * (6144 + 1)
    assert pro_rows[weights.MTP].program_bytes == 0


def test_shared_kv_heads_are_held_by_every_device_that_needs_them():
    """Flash: 4 KV heads of the global layers on 8 devices are repeated twice."""
    flash = read_config("configs/target_mimo_v2_flash.py")
    found = {leaf.name: leaf for leaf in weights.all_leaves(flash, 8)}
    assert found["layers.0.w_qkv"].cut_shape == (4096, 64 * 192 + 8 * (192 + 128))
    assert found["layers.0.w_qkv"].shape == (4096, 64 * 192 + 4 * (192 + 128))
    assert found["layers.1.w_qkv"].cut_shape == found["layers.1.w_qkv"].shape


def test_quantised_global_layers(pro):
    """10 layers of 8 heads: keys 48 + 6 + 2 bytes, values 32 + 4 + 2, and a float tail of 264."""
    kinds = cache_bytes(
        pro, batch_size=1, context=262_144, draft_block_len=8, num_devices=8,
        kv_format=FORMATS["kvarn2"],
    )  # fmt: skip
    tail = 264 * (192 + 128) * 2
    assert kinds[0].num_bytes == 10 * 8 * (262_144 * (56 + 38) + tail)
    assert kinds[0].bytes_per_token == 10 * (56 + 38)


def test_caches_by_kind(pro):
    rows = cache_bytes(pro, batch_size=1, context=262_144, draft_block_len=8, num_devices=8)
    found = {row.kind: row for row in rows}
    per_token = 10 * 8 * (192 + 128) * 2  # layers, heads, key and value, bfloat16
    assert found["global layers"].num_bytes == (262_144 + 8) * per_token
    assert found["global layers"].device_bytes * 8 == found["global layers"].num_bytes
    assert found["global layers"].bytes_per_token == per_token / 8
    # A ring of 128 + 8 slots and 8 behind its end; 1024 + 8 and 8 for the drafter.
    assert found["sliding layers"].num_bytes == 60 * (128 + 8 + 8) * 8 * (192 + 128) * 2
    assert found["drafter context"].num_bytes == 5 * (1024 + 8 + 8) * 8 * (128 + 128) * 2
    assert found["sliding layers"].bytes_per_token == 0


def test_few_kv_heads_are_cached_once_per_device():
    flash = read_config("configs/target_mimo_v2_flash.py")
    rows = cache_bytes(flash, batch_size=2, context=1024, draft_block_len=1, num_devices=8)
    assert rows[0].device_bytes * 4 == rows[0].num_bytes  # 4 heads: one each, twice over


@pytest.mark.parametrize(
    ("num_tokens", "distinct", "h200_ms", "b200_ms"),
    [(1, 8.0, 1.024, 0.615), (4, 31.0, 1.854, 1.112), (8, 59.5, 2.881, 1.729),
     (16, 109.8, 4.694, 2.816)],
)  # fmt: skip
def test_weight_streaming_of_the_pro(pro, pro_rows, num_tokens, distinct, h200_ms, b200_ms):
    """384 (1 - (1 - 8/384)^t) experts of 20.05 MB in 69 layers, and 28.27 GB of the rest."""
    moe = pro.target.moe
    assert roofline.expected_distinct(moe, num_tokens) == pytest.approx(distinct, abs=0.05)
    reads = roofline.of_files(pro, pro_rows, num_tokens=num_tokens, num_devices=8)
    by_hand = (distinct * 69 * 20.054e6 + 28.27e9) / 8
    assert reads.total == pytest.approx(by_hand, rel=2e-3)
    assert reads.total / DEVICES["h200"].hbm_bytes_per_s * 1e3 == pytest.approx(h200_ms, abs=2e-3)
    assert reads.total / DEVICES["b200"].hbm_bytes_per_s * 1e3 == pytest.approx(b200_ms, abs=2e-3)


def test_the_pros_drafter_is_better_cut(pro, pro_rows):
    """5.54 GB whole at 4.8 TB/s against an eighth of it and 11 all-reduces of about 6.5 us."""
    device = DEVICES["h200"]
    choice = roofline.drafter_choice(pro, pro_rows, device, num_tokens=8, num_devices=8)
    assert choice.whole_s * 1e3 == pytest.approx(5.5366e9 / 4.8e9, abs=2e-3)
    assert choice.cut_s * 1e3 == pytest.approx(0.69221e9 / 4.8e9 + 11 * 0.00653, abs=2e-3)


@pytest.mark.parametrize(("name", "share"), [("h200", 0.457), ("b200", 0.274)])
def test_a_thousand_tokens_per_second_against_the_bound(pro, pro_rows, name, share):
    bound = roofline.weight_bound(
        pro, pro_rows, DEVICES[name], num_tokens=8, num_devices=8, accept_length=6.30
    )
    assert 1000 / bound == pytest.approx(share, abs=5e-4)


def test_our_program_reads_an_expert_once_per_token(pro, pro_rows):
    reads = roofline.of_program(
        pro, pro_rows, num_tokens=8, batch_size=1, context=4096, num_devices=8, is_drafting=True
    )
    assert reads.experts == pytest.approx(64 * 69 * 3 * 6144 * 2048 * 4.25 / 8 / 8)
    assert reads.drafter > pro_rows[weights.DRAFTER].device_bytes  # and its run of the head
    # Many rows: no more than all of them.
    many = roofline.of_program(
        pro, pro_rows, num_tokens=8, batch_size=64, context=4096, num_devices=8, is_drafting=True
    )
    assert many.experts == pro_rows[weights.EXPERTS].device_bytes


def test_the_two_bounds_of_a_step():
    device = dataclasses.replace(DEVICES["h200"], launch_s=1e-6, all_reduce_s=10e-6)
    reads = roofline.Reads(experts=4.8e9, dense=2.4e9, head=0.0, caches=0.0, drafter=0.0)
    traffic = roofline.Traffic(num_all_reduces=100, all_reduce_bytes=45e6, num_launches=500)
    time = roofline.step_time(reads, traffic, 0.0, device, 8)
    # 1 + 0.5 ms of memory; 100 x 10 us and 7 x 45 MB over 450 GB/s; 500 us of launches.
    assert time.terms_s == pytest.approx(
        {"experts": 1e-3, "dense weights": 0.5e-3, "all-reduces": 1.7e-3, "launches": 0.5e-3}
    )
    assert time.sum_s == pytest.approx(3.7e-3)
    assert time.overlap_s == pytest.approx(1.7e-3)
    assert time.tokens_per_s(6.3) == pytest.approx(6.3 / 3.7e-3)
    assert sum(time.shares.values()) == pytest.approx(1)
    alone = roofline.step_time(reads, traffic, 0.0, device, 1)
    assert "all-reduces" not in alone.terms_s
    # Arithmetic that takes longer than the reads it hides behind takes their place.
    slow = roofline.step_time(reads, traffic, 8 * device.bf16_flops_per_s * 9e-3, device, 8)
    assert slow.sum_s == pytest.approx(11.2e-3)
    assert slow.overlap_s == pytest.approx(9e-3)


def test_a_verdict_says_how_much_and_how_far():
    verdict = judge(80e9, 141e9, context=1000, max_position=9000, cache_bytes_per_token=10e6,
                    temp_bytes=0.0)  # fmt: skip
    assert verdict.fits
    assert verdict.max_context == 1000 + int((0.9 * 141e9 - 80e9) / 10e6) == 5690
    # Scratch memory grows with a longer context: less of it fits.
    charged = judge(80e9, 141e9, context=1000, max_position=9000, cache_bytes_per_token=10e6,
                    temp_bytes=10e9)  # fmt: skip
    assert charged.max_context == 1000 + int((0.9 * 141e9 - 80e9) / 20e6)
    # Too much: only the caches can shrink, and scratch memory is not promised to.
    over = judge(130e9, 141e9, context=1000, max_position=9000, cache_bytes_per_token=10e6,
                 temp_bytes=10e9)  # fmt: skip
    assert not over.fits
    assert over.max_context == 1000 - 310
    assert str(over) == (
        "does not fit, 3.1 GB over: peak 130.00 GB of 126.9 GB (90% of 141); largest context 690"
    )
    hopeless = judge(300e9, 141e9, context=1000, max_position=9000, cache_bytes_per_token=10e6,
                     temp_bytes=0.0)  # fmt: skip
    assert hopeless.max_context == 0
    assert "no context would fit" in str(hopeless)


def test_flash_in_bf16_does_not_fit_four_h200_but_its_files_do():
    """Our program decodes FP8 experts to bfloat16 when it loads them: 605 GB."""
    model = read_config("configs/target_mimo_v2_flash.py")
    request = make_request("configs/target_mimo_v2_flash.py", model, DEVICES["h200"], num_devices=4)
    plan = make_plan(request, (MEMORY,), is_analytic=True)
    assert not plan.verdict.fits
    assert weights.file_bytes(plan.weights, weights.MTP) / 4 < plan.verdict.budget_bytes
    eight = dataclasses.replace(request, num_devices=8)
    assert make_plan(eight, (MEMORY,), is_analytic=True).verdict.fits


def test_where_the_weights_lie(pro):
    found = {(row.name, row.shape): row for row in placements(pro, DECODE, EIGHT)}
    experts = found["layers.*.experts_down", (384, 6144, 1024)]
    assert experts.count == 69
    assert experts.axes == ("experts", "embed", "expert_hidden")
    assert experts.cut == "expert_hidden over model"
    assert experts.device_bytes == 69 * 384 * 6144 * 1024 // 8
    assert found["final_norm", (6144,)].cut == "whole copy"
    assert not any(name.startswith("mtp") for name, _ in found)
    nano = read_config("configs/nano.py")
    request = make_request("configs/nano.py", nano, DEVICES["h200"], num_devices=2)
    plan = make_plan(request, (SHARDING,))
    qkv = next(row for row in plan.placements if row.name == "layers.*.w_qkv")
    assert qkv.cut == "embed over data"  # a training run is cut by the rules of training
    assert placements(nano, TRAIN, dict.fromkeys(TRAIN.mesh_axes, 1) | {"expert": 2})


def test_what_is_compiled_for_which_part(pro):
    request = make_request("configs/drafter_mimo_v25_pro.py", pro, DEVICES["h200"], num_devices=8)
    memory = jobs(request, (MEMORY,), "a device")
    assert list(memory) == ["DFlash step", "prefill chunk"]
    assert all(job.stops_at_buffers for job in memory.values())
    launches = jobs(request, (LAUNCHES,), "a device")
    assert list(launches) == ["DFlash step", "plain step", "DFlash step, XLA alone"]
    assert not any(job.stops_at_buffers for job in launches.values())
    assert jobs(request, (SHARDING,), "a device") == {}
    assert launches["plain step"].arguments["draft_block_len"] == 1


def test_a_plan_is_plain_values(pro):
    import json

    request = make_request("c.py", pro, DEVICES["b200"], num_devices=8)
    values = json.loads(json.dumps(as_json(make_plan(request, ("roofline",), is_analytic=True))))
    assert values["request"]["model"] == "MiMo-V2.5-Pro + DFlash"
    assert values["verdict"]["fits"] is True
    assert values["speeds"][1]["tokens_per_s"].keys() == {"code", "math", "agent"}
    assert values["weights"]["experts"]["file_bytes"] == pytest.approx(531.35e9, rel=1e-4)


def refused(make, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_requests_that_cannot_be(pro):
    def request(**changes):
        values = {"num_devices": 8} | changes
        return lambda: make_request("c.py", pro, DEVICES["h200"], **values)

    refused(request(context=2_000_000), "context 2000000", "1..1048576")
    refused(request(num_devices=7), "devices 7", "128 heads", "1, 2, 4, 8")
    refused(request(num_devices=0), "devices 0")
    refused(request(batch_size=0), "batch 0")
    refused(request(draft_block_len=9), "draft-block-len 9", "2..8")
    refused(request(accept_lengths={"code": 0.5}), "accept length of code 0.5")
    refused(lambda: find_device("h20"), "'h20'", "nearest: h200", "b200")
    plain = dataclasses.replace(pro, drafter=None)
    refused(
        lambda: make_request("c.py", plain, DEVICES["h200"], num_devices=8, draft_block_len=4),
        "no drafter",
    )
    # 16 devices cut every head, but not all of the drafter's KV projection.
    nano = read_config("configs/nano.py")
    wide = dataclasses.replace(nano, target=dataclasses.replace(nano.target, vocab_size=2050))
    refused(lambda: weights.weigh(wide, DECODE, {"data": 1, "model": 3}), "vocab", "3 parts")


def test_configs_that_cannot_be_read(tmp_path):
    refused(lambda: read_config("configs/nanoo.py"), "configs/nanoo.py is missing", "nano.py")
    refused(lambda: read_config(tmp_path / "none.py"), "is missing")
    bad = tmp_path / "bad.py"
    bad.write_text("def get_config(:\n")
    refused(lambda: read_config(bad), "cannot be read")
    bad.write_text("import nothing_of_that_name\n")
    refused(lambda: read_config(bad), "cannot be read", "nothing_of_that_name")
    bad.write_text("x = 1\n")
    refused(lambda: read_config(bad), "has no get_config()")
    bad.write_text("def get_config(): return 3\n")
    refused(lambda: read_config(bad), "returns int", "PublishedModel")
    refused(lambda: StorageFormats(experts="int3"), "'int3'", "mxfp4")


def test_a_drafter_of_another_target_is_refused(pro):
    with pytest.raises(ConfigError, match="does not fit the target"):
        PublishedModel("mixed", tiny.tiny_target(), pro.drafter)
