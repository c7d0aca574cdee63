"""`python -m mimo_jax.checkpoint`: inspect, forward, doctor and export on the golden checkpoints.

Run: .venv/bin/python -m pytest tests/checkpoint/test_checkpoint_cli.py
"""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mimo_jax.bench.doctor import examine_ids
from mimo_jax.checkpoint.__main__ import main
from mimo_jax.checkpoint.audit import audit, fold_experts
from mimo_jax.checkpoint.hf_target import load_target
from tests.golden.files import ATOL, DATA, arrays

PRO = DATA / "pro-tiny"


def test_every_tensor_has_a_place():
    audits = audit(PRO)
    target, drafter = audits["target"], audits["drafter"]
    assert (target.problem, drafter.problem) == (None, None)
    places = {entry.key: entry.goes_to for entry in target.entries}
    layer = "model.layers.1."
    assert places[layer + "self_attn.qkv_proj.weight"] == "layers.1.w_qkv"
    assert places[layer + "self_attn.qkv_proj.weight_scale_inv"] == "layers.1.w_qkv (scale)"
    expert = layer + "mlp.experts.11.down_proj.weight"
    assert places[expert] == "layers.1.experts_down"
    assert places[expert + "_scale"] == "layers.1.experts_down_scale"
    assert places["model.mtp.layers.1.eh_proj.weight"] == "mtp.1.w_combine"
    assert "NOWHERE" not in " ".join(places.values())
    files = sum(path.stat().st_size for path in PRO.glob("*.safetensors"))
    assert 0.9 * files < target.num_bytes < files
    folded = fold_experts(target.entries)
    assert sum(count for _, count in folded) == len(target.entries)
    assert max(count for _, count in folded) == 12
    assert {e.goes_to for e in drafter.entries} >= {"drafter.w_fuse", "drafter.mask_embedding"}


def test_inspect_prints_a_table_and_a_verdict(tmp_path, capsys):
    assert main(["inspect", str(PRO), "--json", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    for shown in ("experts.*", "target: would load", "drafter: would load"):
        assert shown in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["target"]["problem"] is None
    assert main(["inspect", str(PRO), "--qkv-layout", "plain"]) == 1
    assert "[12, 2], expected [9, 2]" in " ".join(capsys.readouterr().out.split())


def test_inspect_counts_the_bytes_of_one_device(tmp_path, capsys):
    """Two devices hold half of everything that is cut, and all of norms and router."""
    assert main(["inspect", str(PRO), "--devices", "2", "--json", str(tmp_path / "r.json")]) == 0
    entries = json.loads((tmp_path / "r.json").read_text())["target"]["entries"]
    share = {e["key"]: e["device_bytes"] / e["num_bytes"] for e in entries}
    assert share["model.layers.1.self_attn.qkv_proj.weight"] == 0.5
    assert share["model.layers.1.mlp.gate.weight"] == 1.0
    assert share["model.layers.1.mlp.experts.0.down_proj.weight_scale"] == 0.5
    assert "per device" in capsys.readouterr().out
    assert main(["inspect", str(PRO), "--devices", "3"]) == 1
    assert "moe hidden_size 64 cannot be cut into 3 parts" in capsys.readouterr().out


def test_inspect_names_the_stray_tensor(tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(PRO, copy)
    values = json.loads((copy / "config.json").read_text())
    values["n_routed_experts"] = 11
    (copy / "config.json").write_text(json.dumps(values))
    assert main(["inspect", str(copy)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "NOWHERE" in out
    assert "experts.11." in out


def test_forward_writes_what_the_golden_program_computed(tmp_path):
    golden = arrays("pro_tiny")
    np.save(tmp_path / "ids.npy", golden["input_ids"])
    arguments = ["forward", str(PRO), "--input", str(tmp_path / "ids.npy")]
    arguments += ["--output", str(tmp_path / "out.npz"), "--hidden"]
    anchor = int(golden["block1_start"])
    arguments += ["--drafter", str(PRO / "dflash"), "--anchor", str(anchor)]
    assert main(arguments) == 0
    with np.load(tmp_path / "out.npz") as out:
        np.testing.assert_allclose(out["logits"], golden["logits"], atol=1e-4)
        at = golden["layer_positions"]
        np.testing.assert_allclose(out["layer_out"][:, 0, at], golden["layer_out"], atol=1e-4)
        np.testing.assert_array_equal(out["router_idx_3"], golden["router_idx_3"])
        np.testing.assert_allclose(out["router_w_3"], golden["router_w_3"], atol=1e-5)
        assert out["block_logits"].shape == (2, 8, 304)
        np.testing.assert_allclose(
            out["block_logits"][0, 1:], golden["block1_logits"][1:], atol=1e-4
        )


@pytest.mark.parametrize(
    ("ids", "more", "words"),
    [
        (np.zeros((1, 4), np.float32), [], ("integer ids",)),
        (np.full((1, 4), 320), [], ("320", "0..319")),
        (np.zeros((1, 1025), int), [], ("1025", "1024")),
        (np.zeros((1, 4), int), ["--drafter", str(PRO / "dflash"), "--anchor", "4"], ("1..3",)),
    ],
)
def test_wrong_requests_get_one_line(tmp_path, capsys, ids, more, words):
    np.save(tmp_path / "ids.npy", ids)
    out = tmp_path / "out.npz"
    arguments = ["forward", str(PRO), "--input", str(tmp_path / "ids.npy"), "--output", str(out)]
    assert main([*arguments, *more]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert not out.exists()
    for word in words:
        assert word in message, message


def test_doctor_sees_the_missing_mask_vector_and_the_wrong_rope_base(tmp_path):
    golden = arrays("pro_tiny")
    ids = golden["plain0_output_ids"].tolist()
    healthy = examine_ids(PRO, PRO / "dflash", ids, num_anchors=40)
    by_name = {v.name: v.accept_length for v in healthy.variations}
    assert by_name["as shipped"] == max(by_name.values()) >= 2.5
    assert by_name["zero mask vector"] < 1.6
    assert by_name["the target's row as mask vector"] < 1.6
    assert len(healthy.variations[0].acceptance) == 7
    assert "no variation raises" in healthy.findings[0]

    sick = tmp_path / "dflash"
    shutil.copytree(PRO / "dflash", sick)
    for side_file in sick.glob("mask_embedding.*"):
        side_file.unlink()
    report = examine_ids(PRO, sick, ids, num_anchors=40)
    assert "near zero" in report.findings[0]

    shutil.rmtree(sick)
    shutil.copytree(PRO / "dflash", sick)
    values = json.loads((sick / "config.json").read_text())
    values["rope_theta"] = 5e6
    (sick / "config.json").write_text(json.dumps(values))
    report = examine_ids(PRO, sick, ids, num_anchors=40)
    assert report.findings[0].startswith("RoPE base 10000 raises the accept length")


def test_export_and_back(tmp_path, capsys):
    mxfp4 = DATA / "mimo-tiny-mxfp4"
    out = tmp_path / "out"
    assert main(["export", str(mxfp4), str(out)]) == 0
    assert audit(out)["target"].problem is None
    assert {e.dtype for e in audit(out)["target"].entries if ".experts." in e.key} == {"uint8"}
    assert main(["export", str(mxfp4), str(out), "--dtype", "float32"]) == 0
    assert audit(out)["target"].problem is None
    assert {e.dtype for e in audit(out)["target"].entries} == {"float32"}
    config, graph, params = load_target(out)
    assert not config.moe.is_mxfp4
    golden = arrays("mimo_tiny_mxfp4")
    logits = nnx.merge(graph, params)(jnp.asarray(golden["input_ids"])).logits
    np.testing.assert_allclose(logits, golden["logits"], atol=ATOL)
    assert main(["export", str(mxfp4), str(mxfp4)]) == 2
    assert "output is the checkpoint itself" in capsys.readouterr().err


def test_inspect_reports_scales_that_stand_for_no_number(tmp_path, capsys):
    """Bytes 253 to 255 by name and count; nothing is said of a copy that has headers only."""
    copy = tmp_path / "copy"
    shutil.copytree(DATA / "mimo-tiny-mxfp4", copy)
    path = copy / "model.safetensors"
    name = "model.layers.3.mlp.experts.5.up_proj.weight_scale"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])[name]["data_offsets"]
    assert end - begin == 32 * 2
    data[start + begin : start + begin + 4] = [252, 253, 254, 255]
    path.write_bytes(data)
    assert main(["inspect", str(copy)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"target: {name}: 3 scale bytes of 253 to 255" in out
    assert out.count("scale bytes of") == 1
    assert audit(DATA / "mimo-tiny-mxfp4")["target"].num_odd_scales == {}
    size = len(data)
    path.write_bytes(data[:start])
    with path.open("r+b") as file:
        file.truncate(size)
    assert audit(copy)["target"].num_odd_scales == {}
