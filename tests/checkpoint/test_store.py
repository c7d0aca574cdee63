"""Run: pytest tests/checkpoint/test_store.py"""

import errno
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from mimo_jax.checkpoint.store import (
    CheckpointStore,
    DamagedCheckpointError,
    DiskFullError,
    leaf_hash,
)


def make_state(seed: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "layers": [{"q": jax.random.normal(keys[0], (28, 20))}],
        "experts": jax.random.normal(keys[1], (7, 28, 12)).astype(jnp.bfloat16),
        "packed": jax.random.bits(keys[2], (51, 97), jnp.uint8),
        "scale": jnp.array([1.0, 448.0, -0.0], jnp.float8_e4m3fn),
    }
    floats = {"q": params["layers"][0]["q"]}
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(floats),
        "step": jnp.int32(seed),
    }


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array)
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


@pytest.fixture
def two_steps(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run")
    for step in (10, 20):
        store.save(step, make_state(step), {"seed": step, "mix": {"math": 0.75}})
    return store


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip_bits(step_dir: Path) -> None:
    """Inverts 16 bytes of one array, found by its content, so that no index is hit.

    Orbax compresses chunks, but random bytes do not compress and lie in the file as they are.
    """
    needle = np.asarray(make_state(20)["params"]["packed"]).tobytes()
    for path in (p for p in step_dir.rglob("*") if p.is_file()):
        data = bytearray(path.read_bytes())
        start = data.find(needle[:8])
        if start >= 0:
            data[start : start + 16] = bytes(255 - byte for byte in data[start : start + 16])
            path.write_bytes(bytes(data))
            return
    raise AssertionError("array bytes not found in any file of the step")


def truncate(step_dir: Path) -> None:
    path = largest_file(step_dir / "state")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_restores_what_was_saved(two_steps: CheckpointStore) -> None:
    restored = two_steps.restore_latest(abstract(make_state(0)))
    assert restored is not None
    step, state, meta = restored
    assert step == 20
    assert meta == {"seed": 20, "mix": {"math": 0.75}}
    assert_same(state, make_state(20))


def test_nothing_saved_is_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "absent").restore_latest(make_state(0)) is None
    assert not (tmp_path / "absent").exists()


def test_keeps_the_newest(two_steps: CheckpointStore) -> None:
    two_steps.save(30, make_state(30), {})
    assert two_steps.steps() == [20, 30]


def delete_array_file(step_dir: Path) -> None:
    largest_file(step_dir / "state").unlink()


def delete_json(step_dir: Path) -> None:
    (step_dir / "manifest" / "metadata").unlink()


def empty_the_step(step_dir: Path) -> None:
    shutil.rmtree(step_dir)
    step_dir.mkdir()


def edit_json(step_dir: Path) -> None:
    path = step_dir / "manifest" / "metadata"
    text = path.read_text()
    assert "0.75" in text
    path.write_text(text.replace("0.75", "0.57"))


def overwrite_json(step_dir: Path) -> None:
    path = step_dir / "manifest" / "metadata"
    path.write_bytes(bytes(path.stat().st_size))


def swap_with_older(step_dir: Path) -> None:
    shutil.rmtree(step_dir)
    shutil.copytree(step_dir.parent / "10", step_dir)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_bits, "1 of 8 leaves changed on disk: params/packed"),
        (truncate, r"file state/.* has \d+ bytes, saved with \d+"),
        (delete_array_file, "file state/.* is missing"),
        (delete_json, "file manifest/metadata is missing"),
        (empty_the_step, ""),
        (edit_json, "the manifest does not have the hash"),
        (overwrite_json, "JSONDecodeError"),
        (swap_with_older, "the manifest describes step 10"),
    ],
)
def test_walks_back_over_damage(
    two_steps: CheckpointStore, caplog: pytest.LogCaptureFixture, damage: Any, reason: str
) -> None:
    damage(two_steps.directory / "20")
    restored = two_steps.restore_latest(abstract(make_state(0)))
    assert restored is not None
    assert restored[0] == 10
    assert_same(restored[1], make_state(10))
    assert re.search(f"step 20 is damaged: .*{reason}", caplog.text), caplog.text


def test_walks_back_when_orbax_fails(
    two_steps: CheckpointStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # simulated: a real failure leaves Orbax 0.12.8's tasks behind, which fail in later tests
    read_state = two_steps._read_state

    def fail_on_20(step: int, *args: Any) -> Any:
        if step == 20:
            raise OSError("DATA_LOSS: invalid header")
        return read_state(step, *args)

    monkeypatch.setattr(two_steps, "_read_state", fail_on_20)
    restored = two_steps.restore_latest(abstract(make_state(0)))
    assert restored is not None
    assert restored[0] == 10
    assert "step 20 is damaged: OSError: DATA_LOSS: invalid header" in caplog.text


def test_all_damaged_raises(two_steps: CheckpointStore) -> None:
    truncate(two_steps.directory / "10")
    delete_json(two_steps.directory / "20")
    with pytest.raises(DamagedCheckpointError, match=r"step 20 is[\s\S]*step 10 is"):
        two_steps.restore_latest(abstract(make_state(0)))


def test_run_goes_on_past_a_damaged_step(two_steps: CheckpointStore) -> None:
    flip_bits(two_steps.directory / "20")
    two_steps.save(15, make_state(15), {})
    assert two_steps.steps() == [10, 15]
    assert (two_steps.directory / "set_aside" / "20").is_dir()
    two_steps.save(20, make_state(21), {})
    restored = two_steps.restore_latest(abstract(make_state(0)))
    assert restored is not None
    assert restored[0] == 20
    assert_same(restored[1], make_state(21))


def test_file_list_may_be_missing(two_steps: CheckpointStore) -> None:
    (two_steps.directory / "20" / "files.json").unlink()  # killed before it was written
    restored = two_steps.restore_latest(abstract(make_state(0)))
    assert restored is not None
    assert restored[0] == 20
    assert_same(restored[1], make_state(20))


def test_ignores_half_written_directories(two_steps: CheckpointStore) -> None:
    half = two_steps.directory / "30.orbax-checkpoint-tmp-7"
    half.mkdir()
    (half / "state").mkdir()
    assert two_steps.steps() == [10, 20]


def test_half_written_directories_go_with_the_next_save(two_steps: CheckpointStore) -> None:
    half = two_steps.directory / "25.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    two_steps.save(30, make_state(30), {})
    assert sorted(path.name for path in two_steps.directory.iterdir()) == ["20", "30"]


def test_deleting_any_one_file_is_noticed_or_harmless(
    two_steps: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Every file of a step in turn. Only our own list may be missing: the hashes judge then."""
    step_dir = two_steps.directory / "20"
    files = [path for path in sorted(step_dir.rglob("*")) if path.is_file()]
    assert len(files) >= 10
    for path in files:
        kept = path.read_bytes()
        path.unlink()
        restored = two_steps.restore_latest(abstract(make_state(0)))
        assert restored is not None
        expected = 20 if path.name == "files.json" else 10
        assert restored[0] == expected, path
        assert_same(restored[1], make_state(expected))
        if expected == 10:
            name = path.relative_to(step_dir)
            assert f"step 20 is damaged: DamagedCheckpointError: file {name} is missing" in (
                caplog.text
            )
        path.write_bytes(kept)


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 2.3 MB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2300k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system (root)")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def megabyte(seed: int) -> dict[str, Any]:
    return {"w": jax.random.bits(jax.random.key(seed), (1000, 1000), jnp.uint8)}


def check_full(store: CheckpointStore) -> None:
    """Steps 1 and 2 are stored and 3 did not fit."""
    assert sorted(path.name for path in store.directory.iterdir()) == ["1", "2"]
    restored = store.restore_latest(megabyte(0))
    assert restored is not None
    assert restored[0] == 2
    assert_same(restored[1], megabyte(2))


def test_a_full_disk_leaves_earlier_steps_intact(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "run")
    for step in (1, 2):
        store.save(step, megabyte(step), {})
    expected = rf"no space left in {small_disk / 'run'} \(0\.\d MB free\): step 3 is not saved, "
    with pytest.raises(DiskFullError, match=expected + r"earlier ones are intact \(1, 2\)$"):
        store.save(3, megabyte(3), {})
    check_full(store)
    shutil.rmtree(store.directory / "1")
    store.save(3, megabyte(3), {})
    restored = store.restore_latest(megabyte(0))
    assert restored is not None
    assert restored[0] == 3


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        ValueError("RESOURCE_EXHAUSTED: Failed to write 66370 bytes: No space left on device"),
    ],
)
def test_every_way_of_saying_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Where nothing may be mounted: the manager fails half-way, as Orbax does on a full disk."""
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, megabyte(step), {})

    def save(manager: Any, step: int, **_: Any) -> bool:
        (store.directory / f"{step}.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
        raise error

    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    with pytest.raises(DiskFullError, match="step 3 is not saved"):
        store.save(3, megabyte(3), {})
    check_full(store)


def test_other_errors_of_a_save_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(manager: Any, step: int, **_: Any) -> bool:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    with pytest.raises(OSError, match="Permission denied") as caught:
        CheckpointStore(tmp_path).save(1, megabyte(1), {})
    assert not isinstance(caught.value, DiskFullError)


@pytest.mark.multi_device
def test_restores_on_1_2_4_8_devices_from_each_of_them(tmp_path: Path) -> None:
    """All 16 pairs, matrices cut along either axis, whole ones beside them."""

    def placed(state: Any, count: int) -> Any:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("x",))
        specs = {"columns": (None, "x"), "experts": ("x",), "norm": (), "step": ()}
        cut = lambda name: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*name))
        return {name: jax.device_put(leaf, cut(specs[name])) for name, leaf in state.items()}

    state = {
        "columns": jax.random.normal(jax.random.key(1), (5, 24)),
        "experts": jax.random.normal(jax.random.key(2), (16, 3, 7)).astype(jnp.bfloat16),
        "norm": jnp.linspace(0.0, 1.0, 11),
        "step": jnp.int32(9),
    }
    blank = jax.tree.map(jnp.zeros_like, state)
    for saved_on in (1, 2, 4, 8):
        store = CheckpointStore(tmp_path / str(saved_on))
        store.save(9, placed(state, saved_on), {})
        for count in (1, 2, 4, 8):
            like = placed(blank, count)
            restored = store.restore_latest(like)
            assert restored is not None
            assert_same(restored[1], state)
            for ours, wanted in zip(
                jax.tree.leaves(restored[1]), jax.tree.leaves(like), strict=True
            ):
                assert ours.sharding.is_equivalent_to(wanted.sharding, ours.ndim)


def test_other_config_names_leaves_and_shapes(two_steps: CheckpointStore) -> None:
    state = make_state(0)
    state["params"]["layers"][0]["q"] = jnp.zeros((28, 24))
    state["params"]["packed"] = state["params"]["packed"].astype(jnp.int8)
    state["params"]["gate"] = jnp.zeros((3,))
    del state["params"]["scale"]
    with pytest.raises(ValueError, match="another config") as caught:
        two_steps.restore_latest(abstract(state))
    text = str(caught.value)
    assert "params/layers/0/q: stored float32[28,20], wanted float32[28,24]" in text
    assert "params/packed: stored uint8[51,97], wanted int8[51,97]" in text
    assert "params/gate: stored absent, wanted float32[3]" in text
    assert "params/scale: stored float8_e4m3fn[3], wanted absent" in text


def test_restores_onto_another_sharding(tmp_path: Path) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices (XLA_FLAGS=--xla_force_host_platform_device_count=2)")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    store = CheckpointStore(tmp_path)
    w = jax.random.normal(jax.random.key(1), (5, 6))
    store.save(1, {"w": w}, {})
    restored = store.restore_latest(
        {"w": jax.ShapeDtypeStruct((5, 6), jnp.float32, sharding=split)}
    )
    assert restored is not None
    assert restored[1]["w"].sharding == split
    assert_same(restored[1], {"w": w})


def test_rejects_what_it_cannot_store(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(ValueError, match="key_data"):
        store.save(1, {"key": jax.random.key(0)}, {})
    with pytest.raises(ValueError, match="pos: int64"):
        store.save(1, {"pos": np.int64(3)}, {})
    with pytest.raises(TypeError):
        store.save(1, {"w": jnp.zeros(3)}, {"config": object()})
    with pytest.raises(ValueError, match="at least 2"):
        CheckpointStore(tmp_path, max_to_keep=1)
    assert store.steps() == []


def test_leaf_hash_sees_dtype_shape_and_sign_of_zero() -> None:
    zero = jnp.zeros((2, 3))
    others = [-zero, zero.reshape(3, 2), zero.astype(jnp.int32), jnp.zeros(())]
    assert len({leaf_hash(x) for x in [zero, *others]}) == 5
    assert leaf_hash(zero) == leaf_hash(np.zeros((2, 3), np.float32))
