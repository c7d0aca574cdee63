"""Saves and restores training state with Orbax, and does not trust what comes back.

Problem: Orbax 0.12 restores a file with flipped bits without an error, and on a truncated or
missing file it fails instead of going back to the step before. A run that resumes by itself must do
neither. Choice: beside the arrays each step carries a JSON manifest with shape, dtype and BLAKE2b
hash of every leaf, itself under a hash; `restore_latest` recomputes them all and walks back to the
newest step for which they hold. A list of the step's files and sizes, written last, names a
truncated or missing file before Orbax meets it: reading beside one leaves tasks behind that fail
later, in another place. A step without that list (killed in between) is judged by its hashes alone.

- Leaves are stored flat under their path names, so the file knows no NamedTuples or optimizer
  classes, and a changed config can be answered with names and shapes.
- A changed config is no damage: it raises instead of walking back, because older steps would
  differ in the same way and the run would silently start from scratch.
- Orbax refuses (returns False, no error) to save a step below one it already has. After a walk-back
  the damaged step is such a one; so `save` first moves every step at or past its own to
  `set_aside/`, where it is kept until the next one of that number.

Several processes call `save` and `restore_latest` together, on one directory that all can see.
Orbax lets each write its own parts; hashes are of whole leaves, gathered one at a time, so that a
step can be restored on any mesh; what stands beside them is the first process's to write.

A full disk fails the save and harms nothing that is there: Orbax writes into a directory of another
name and drops old steps last. What it leaves half-written it would keep for ever; here it goes at
once, or, if the run was killed, with the next save.

Traps: saving is synchronous, because the hashes need the host copy and the caller donates its
state. Half-written directories (`N.orbax-checkpoint-tmp*`) are ignored, as Orbax does. A full disk
is an OSError where Orbax writes JSON, and a ValueError with its text where it writes arrays.
"""

import contextlib
import errno
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from mimo_jax.distributed import ALONE, ProcessGroup
from mimo_jax.sharding import to_host

_FORMAT = 1
_FILE_LIST = "files.json"
_HALF_WRITTEN = "*.orbax-checkpoint-tmp*"
_MAX_ITEMS_SHOWN = 8
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "File too large")


class DamagedCheckpointError(OSError):
    """A stored step does not hold what was saved, or none of the stored steps does."""


class DiskFullError(OSError):
    """Something could not be written for want of space; the message names directory and space."""


@contextlib.contextmanager
def naming_full_disk(directory: Path, what_remains: str = "") -> Iterator[None]:
    """Turns errors for want of space into a DiskFullError, and lets all others pass.

    Args:
      directory: Where the caller writes.
      what_remains: Ends the message.
    """
    try:
        yield
    except Exception as error:  # tensorstore has no class of its own for it
        is_full = isinstance(error, OSError) and error.errno in _FULL
        if not is_full and not any(text in str(error) for text in _FULL_TEXTS):
            raise
        free = f"{shutil.disk_usage(directory).free / 1e6:,.1f} MB free"
        raise DiskFullError(f"no space left in {directory} ({free}){what_remains}") from error


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Orbax logs the traceback of every failure that it then raises."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _flatten(tree: Any) -> tuple[dict[str, Any], Any]:
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    named: dict[str, Any] = {}
    for path, leaf in paths_and_leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise ValueError(f"two leaves of the state have the same path name {name!r}")
        leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(f"{name}: store jax.random.key_data(key), not a typed key")
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise ValueError(
                f"{name}: {leaf.dtype} needs jax_enable_x64; keep host numbers in meta"
            )
        named[name] = leaf
    return named, treedef


def leaf_hash(leaf: Any) -> str:
    """BLAKE2b of a leaf's dtype, shape and bytes, whatever its sharding.

    Copies the whole leaf to the host; see `sharding.to_host` for several processes.

    Args:
      leaf: Array of any dtype, the 8- and 4-bit floats included.

    Returns:
      32 hex digits.

    Example: equal for a bf16 array and its copy; different for -0.0 and 0.0.
    """
    array = np.ascontiguousarray(to_host(leaf))
    digest = hashlib.blake2b(f"{array.dtype} {np.shape(leaf)}".encode(), digest_size=16)
    digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _json_hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _differences(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    def text(shape: Any, dtype: Any) -> str:
        return f"{dtype}[{','.join(str(n) for n in shape)}]"

    differences = []
    for name in sorted(stored.keys() | wanted.keys()):
        old = text(stored[name]["shape"], stored[name]["dtype"]) if name in stored else "absent"
        new = text(wanted[name].shape, wanted[name].dtype) if name in wanted else "absent"
        if old != new:
            differences.append(f"{name}: stored {old}, wanted {new}")
    return differences


def _join(items: list[str], separator: str) -> str:
    shown = items[:_MAX_ITEMS_SHOWN]
    if len(items) > len(shown):
        shown.append(f"and {len(items) - len(shown)} more")
    return separator.join(shown)


class CheckpointStore:
    """Numbered steps of one run's state in one directory.

    Knows no model and no optimizer: the state is any pytree of arrays.

    Args:
      directory: Made on the first save.
      max_to_keep: Newest steps kept; at least 2, so that there is one to walk back to.
      group: The processes that save and restore together.

    Raises:
      ValueError: If max_to_keep is below 2.

    Example:
      store = CheckpointStore("runs/a/state")
      store.save(100, {"params": params, "opt": opt_state}, {"seed": 0})
      step, state, meta = store.restore_latest({"params": params, "opt": opt_state})
    """

    def __init__(
        self, directory: str | Path, max_to_keep: int = 2, group: ProcessGroup = ALONE
    ):
        if max_to_keep < 2:
            raise ValueError(f"max_to_keep must be at least 2 to walk back, got {max_to_keep}")
        self.directory = Path(directory).absolute()
        self.max_to_keep, self._group = max_to_keep, group

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.max_to_keep, enable_async_checkpointing=False
        )
        return ocp.CheckpointManager(self.directory, options=options)

    def steps(self) -> list[int]:
        """Lists the stored steps in ascending order, damaged ones included, half-written ones not.

        Returns:
          Step numbers; [] if the directory does not exist.
        """
        if not self.directory.is_dir():
            return []
        with self._manager() as manager:
            return sorted(manager.all_steps())

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Writes one step and waits until it is on disk.

        Steps at or past this one are moved to `set_aside/` first: they are damaged, or belong to a
        future that the run has gone back on.

        Args:
          step: Number of updates done, >= 0.
          state: Pytree of arrays; no typed random keys, no 64-bit leaves.
          meta: What JSON can hold: config, seed, data position. Tuples come back as lists.

        Raises:
          ValueError: If a leaf cannot be stored, with its name.
          TypeError: If meta is not JSON.
          DamagedCheckpointError: If Orbax declined to save.
          DiskFullError: If there is no space; the steps before are intact.
        """
        named, _ = _flatten(state)
        body = {
            "format": _FORMAT,
            "step": step,
            "meta": json.loads(json.dumps(meta)),
            "leaves": {
                name: {
                    "shape": list(leaf.shape),
                    "dtype": str(leaf.dtype),
                    "blake2b": leaf_hash(leaf),
                }
                for name, leaf in named.items()
            },
        }
        steps = self.steps()
        later_steps = [later for later in steps if later >= step]
        self._group.barrier("all have seen the steps")
        for later in later_steps if self._group.is_first else ():
            self._set_aside(later)
        if self._group.is_first:
            self._drop_half_written()
        self._group.barrier("later steps are set aside")
        kept = ", ".join(str(earlier) for earlier in steps if earlier < step) or "none"
        remains = f": step {step} is not saved, earlier ones are intact ({kept})"
        with naming_full_disk(self.directory, remains):
            try:
                self._write(step, named, body)
            except BaseException:
                if self._group.count == 1:  # others may still be writing theirs
                    self._drop_half_written()
                raise
        self._group.barrier("saved")

    def _write(self, step: int, named: dict[str, Any], body: dict[str, Any]) -> None:
        with _quiet_orbax(), self._manager() as manager:
            is_saved = manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(named),
                    manifest=ocp.args.JsonSave({"body": body, "blake2b": _json_hash(body)}),
                ),
            )
            manager.wait_until_finished()
        if not is_saved:
            raise DamagedCheckpointError(f"step {step} was not saved in {self.directory}")
        if self._group.is_first:
            self._list_files(step)

    def _drop_half_written(self) -> None:
        for path in self.directory.glob(_HALF_WRITTEN):
            shutil.rmtree(path, ignore_errors=True)

    def _list_files(self, step: int) -> None:
        step_dir = self.directory / str(step)
        sizes = {
            str(path.relative_to(step_dir)): path.stat().st_size
            for path in sorted(step_dir.rglob("*"))
            if path.is_file()
        }
        part_path = step_dir / f"{_FILE_LIST}.part"
        part_path.write_text(json.dumps(sizes, indent=1))
        part_path.rename(step_dir / _FILE_LIST)

    def restore_latest(self, abstract_state: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """Reads the newest step whose every leaf has the hash it was saved with.

        Changes nothing on disk. Each step passed over is logged with what was wrong with it.

        Args:
          abstract_state: Pytree of arrays or `ShapeDtypeStruct`s; shapes and dtypes must be the
            stored ones, shardings may differ from those of the saving run. Leaves without a
            sharding go to the first device.

        Returns:
          (step, state, meta), or None if nothing was ever saved here.

        Raises:
          ValueError: If an intact manifest lists other leaves, shapes or dtypes.
          DamagedCheckpointError: If there are steps, but none is intact: starting from scratch
            must be a decision.
        """
        wanted, treedef = _flatten(abstract_state)
        troubles = []
        for step in reversed(self.steps()):
            try:
                self._check_files(step)
                body = self._read_manifest(step)
                differences = _differences(body["leaves"], wanted)
                named = {} if differences else self._read_state(step, wanted, body["leaves"])
            except Exception as error:  # Orbax has no common base for its failures
                lines = str(error).splitlines() or [""]
                trouble = f"step {step} is damaged: {type(error).__name__}: {lines[0][:300]}"
                logging.warning("checkpoint %s; passed over in %s", trouble, self.directory)
                troubles.append(trouble)
                continue
            if differences:
                raise ValueError(
                    f"checkpoint step {step} was saved under another config; restore it with that "
                    f"one or start in a new directory:\n  {_join(differences, '\n  ')}"
                )
            leaves = [named[name] for name in wanted]
            return step, jax.tree_util.tree_unflatten(treedef, leaves), body["meta"]
        if troubles:
            raise DamagedCheckpointError(
                f"no intact step in {self.directory}:\n  " + "\n  ".join(troubles)
            )
        return None

    def _check_files(self, step: int) -> None:
        step_dir = self.directory / str(step)
        if not (step_dir / _FILE_LIST).exists():
            return
        for name, size in json.loads((step_dir / _FILE_LIST).read_text()).items():
            path = step_dir / name
            if not path.is_file():
                raise DamagedCheckpointError(f"file {name} is missing")
            if path.stat().st_size != size:
                raise DamagedCheckpointError(
                    f"file {name} has {path.stat().st_size} bytes, saved with {size}"
                )

    def _read_manifest(self, step: int) -> dict[str, Any]:
        with self._manager() as manager:
            args = ocp.args.Composite(manifest=ocp.args.JsonRestore())
            manifest = manager.restore(step, args=args).manifest
        if _json_hash(manifest["body"]) != manifest["blake2b"]:
            raise DamagedCheckpointError("the manifest does not have the hash it was saved with")
        if manifest["body"]["format"] != _FORMAT or manifest["body"]["step"] != step:
            raise DamagedCheckpointError(
                f"the manifest describes step {manifest['body']['step']} in format "
                f"{manifest['body']['format']}, expected step {step} in format {_FORMAT}"
            )
        return manifest["body"]

    def _read_state(
        self, step: int, wanted: dict[str, Any], stored: dict[str, Any]
    ) -> dict[str, jax.Array]:
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or here
            )
            for name, leaf in wanted.items()
        }
        with self._manager() as manager:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
            named = manager.restore(step, args=args).state
        changed = [name for name in wanted if leaf_hash(named[name]) != stored[name]["blake2b"]]
        if changed:
            raise DamagedCheckpointError(
                f"{len(changed)} of {len(wanted)} leaves changed on disk: {_join(changed, ', ')}"
            )
        return named

    def _set_aside(self, step: int) -> None:
        source = self.directory / str(step)
        goal = self.directory / "set_aside" / str(step)
        logging.warning("checkpoint step %d is replaced; the old one is now %s", step, goal)
        goal.parent.mkdir(exist_ok=True)
        shutil.rmtree(goal, ignore_errors=True)
        source.rename(goal)
