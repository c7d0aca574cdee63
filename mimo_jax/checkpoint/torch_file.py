"""Plain tensors out of a torch.save file, without torch and without running the pickle in it.

A pickle is a program; unpickling one runs it. The form that torch.save gives a dictionary of
tensors needs some twenty opcodes and two callables (rebuild a tensor from a storage, make an empty
OrderedDict), so exactly those are interpreted here and every other opcode or name is refused.

For side files of a few kilobytes (a drafter's mask_embedding.pt); weights belong in safetensors.
"""

import dataclasses
import os
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mimo_jax.checkpoint.safetensors_reader import CheckpointError

MAX_BYTES = 64 << 20
_STORAGES = {
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "HalfStorage": np.dtype("<f2"),
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
}
_REBUILD, _ORDERED_DICT = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_MARK = object()


@dataclasses.dataclass(frozen=True)
class _Name:
    """A global that the pickle mentions; never looked up."""

    text: str


class _Interpreter:
    """Runs the allowed opcodes of one pickle over a stack of plain values."""

    def __init__(self, path: Path, storages: dict[str, bytes]):
        self.path, self.storages = path, storages
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def refuse(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; only a dictionary of plain tensors is read")

    def run(self, program: bytes) -> Any:
        try:
            for opcode, argument, _ in pickletools.genops(program):
                if opcode.name == "STOP":
                    break
                self._step(opcode.name, argument)
            (value,) = self.stack
        except CheckpointError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise self.refuse(f"its pickle is damaged ({error})") from error
        return value

    def _pop_to_mark(self) -> list:
        last = max(i for i, item in enumerate(self.stack) if item is _MARK)
        items = self.stack[last + 1 :]
        del self.stack[last:]
        return items

    def _step(self, name: str, argument: Any) -> None:
        push, pop = self.stack.append, self.stack.pop
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                push(_MARK)
            case "EMPTY_DICT":
                push({})
            case "EMPTY_TUPLE":
                push(())
            case "TUPLE":
                push(tuple(self._pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [pop() for _ in range(int(name[-1]))]
                push(tuple(items[::-1]))
            case "NEWTRUE" | "NEWFALSE" | "NONE":
                push({"NEWTRUE": True, "NEWFALSE": False, "NONE": None}[name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "SHORT_BINUNICODE":
                push(argument)
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "BINGET" | "LONG_BINGET":
                push(self.memo[argument])
            case "GLOBAL":
                push(_Name(argument))
            case "STACK_GLOBAL":
                attribute, module = pop(), pop()
                push(_Name(f"{module} {attribute}"))
            case "BINPERSID":
                push(self._storage(pop()))
            case "REDUCE":
                arguments, function = pop(), pop()
                push(self._call(function, arguments))
            case "SETITEM":
                value, key = pop(), pop()
                self._set(self.stack[-1], [key, value])
            case "SETITEMS":
                items = self._pop_to_mark()
                self._set(self.stack[-1], items)
            case _:
                raise self.refuse(f"its pickle uses opcode {name}")

    def _set(self, target: Any, items: list) -> None:
        if not isinstance(target, dict) or len(items) % 2:
            raise self.refuse("its pickle fills something that is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise self.refuse(f"it has the key {key!r}")
            target[key] = value

    def _storage(self, identity: Any) -> np.ndarray:
        kind, storage, key = identity[0], identity[1], identity[2]
        dtype = None
        if isinstance(storage, _Name):
            dtype = _STORAGES.get(storage.text.removeprefix("torch "))
        if kind != "storage" or dtype is None or key not in self.storages:
            raise self.refuse(f"it has a storage {storage} that is not known")
        return np.frombuffer(self.storages[key], dtype)

    def _call(self, function: Any, arguments: Any) -> Any:
        name = function.text if isinstance(function, _Name) else repr(function)
        if name == _ORDERED_DICT and not len(arguments):
            return {}
        if name != _REBUILD:
            raise self.refuse(f"its pickle calls {name.replace(' ', '.')}")
        storage, offset, shape, strides = arguments[:4]
        if not isinstance(storage, np.ndarray) or len(shape) != len(strides):
            raise self.refuse("a tensor has no storage")
        contiguous = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        count = int(np.prod(shape))
        if tuple(strides) != contiguous or offset < 0 or offset + count > len(storage):
            raise self.refuse(f"a tensor of shape {tuple(shape)} is not contiguous in its storage")
        return storage[offset : offset + count].reshape(shape)


def read_torch_file(path: str | os.PathLike) -> dict[str, Any]:
    """The dictionary in a torch.save file; tensors as NumPy arrays.

    Raises:
      CheckpointError: If it is no such file, is damaged, or holds anything but a dictionary from
        strings to tensors, numbers and strings.

    Example: mask_embedding.pt -> {"mask_token_id": 300, "embedding": bfloat16 [160]}.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > MAX_BYTES:
                raise CheckpointError(f"{path}: more than {MAX_BYTES} bytes; use safetensors")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise CheckpointError(f"{path}: is compressed, which torch.save never does")
            programs = [e for e in entries if e.filename.rsplit("/", 1)[-1] == "data.pkl"]
            if len(programs) != 1:
                raise CheckpointError(f"{path}: is no file of torch.save (no data.pkl)")
            root = programs[0].filename.removesuffix("data.pkl")
            order = f"{root}byteorder"
            if order in archive.namelist() and archive.read(order) != b"little":
                raise CheckpointError(f"{path}: is big-endian")
            storages = {
                e.filename.removeprefix(f"{root}data/"): archive.read(e)
                for e in entries
                if e.filename.startswith(f"{root}data/")
            }
            program = archive.read(programs[0])
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path}: cannot be read as a torch file: {error}") from error
    interpreter = _Interpreter(path, storages)
    value = interpreter.run(program)
    plain = (np.ndarray, int, float, str, bool, type(None))
    if not isinstance(value, dict) or not all(isinstance(v, plain) for v in value.values()):
        raise interpreter.refuse("it holds something else")
    return value
