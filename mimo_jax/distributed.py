"""The group of processes that do one job together, and how one of them leaves it.

`open_group` makes a `ProcessGroup` out of three flags or of what SLURM or Open MPI say. Alone, a
process starts nothing and every method returns at once, so callers have one path for one and for
many. Several processes are joined by `jax.distributed`: all of them then see the devices of all,
collectives on CPUs go through Gloo, and the coordinator (inside process 0) watches heartbeats.

- Waiting for another process is a wait at the coordinator (`barrier`, `share`, `gather`), never a
  collective of devices: process 0 may work for an hour while the others wait, and in serving the
  processes have no program in common.
- Death. A process that has not been heard of for HEARTBEAT_TIMEOUT_S is dead, and JAX aborts all
  others. If a collective notices earlier, Python gets an exception instead. `mimo_jax/witness.py`
  makes one line of either. Whoever leaves with an error leaves at once (`abandon`): JAX's orderly
  shutdown waits for all, and would wait for a process that nobody told to stop.
- JAX's preemption service is off. It catches SIGTERM, so that `kill` would not end a process.

Trap: JAX must not be imported before `open_group`, nor be at the top of this module: `--help`
answers without it, and its C++ side takes hold of file descriptor 2 as it finds it.
"""

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn

from mimo_jax.config import ConfigError, require
from mimo_jax.witness import Witness

JOIN_TIMEOUT_S = 120
# More than a stalled machine may take, and with it all is over within a minute.
HEARTBEAT_TIMEOUT_S = 40
# Waiting needs no limit of its own: heartbeats say whether the others are alive.
_FOREVER_MS = 30 * 24 * 3600 * 1000
# Number of processes and own number, as a launcher sets them. The address is JAX's to find out.
_LAUNCHERS = {
    "slurm": ("SLURM_NTASKS", "SLURM_PROCID"),
    "ompi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}


def _optional(metavar: str, default: str):
    """How `--help` shows a flag; nothing on GPU images without tyro, which parse no flags."""
    try:
        import tyro
    except ModuleNotFoundError:
        return None
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclasses.dataclass(frozen=True)
class ProcessFlags:
    """Several processes, one job. Start the same command once per process, with these three flags;
    under SLURM (srun) or Open MPI (mpirun) without them."""

    coordinator: Annotated[str | None, _optional("HOST:PORT", "as SLURM or Open MPI say")] = None
    """Address of process 0, with a port that is free there; the same for every process."""
    num_processes: Annotated[
        int | None, _optional("INT", "as SLURM or Open MPI say, else 1")
    ] = None
    """Processes in all; 1 also where a launcher says otherwise."""
    process_id: Annotated[int | None, _optional("INT", "as SLURM or Open MPI say")] = None
    """Which one this is, from 0."""


@dataclasses.dataclass(frozen=True)
class Membership:
    """What `jax.distributed.initialize` is told.

    Attributes:
      index: Of this process, 0 .. count - 1.
      count: Processes in all.
      coordinator: HOST:PORT, or None where JAX asks the launcher.
      launcher: "slurm", "ompi", or None if the flags say everything.
    """

    index: int = 0
    count: int = 1
    coordinator: str | None = None
    launcher: str | None = None


_SINGLE = Membership()


def _from_launcher(environ: Mapping[str, str]) -> tuple[str, int, int] | None:
    """(launcher, number of processes, index) if a launcher started more than one process."""
    for launcher, names in _LAUNCHERS.items():
        values = [environ.get(name, "") for name in names]
        if all(value.isdecimal() for value in values) and int(values[0]) > 1:
            return launcher, int(values[0]), int(values[1])
    return None


def membership(flags: ProcessFlags, environ: Mapping[str, str]) -> Membership:
    """Which process this is, by the flags or by the launcher; touches nothing.

    Args:
      flags: All three, none, `num_processes` 1 alone, or under a launcher `coordinator` alone.
      environ: As os.environ.

    Raises:
      ConfigError: In one line that names the flag and what is allowed.

    Example: no flags, {"SLURM_NTASKS": "4", "SLURM_PROCID": "2"} -> index 2 of 4, by slurm.
    """
    given = {name: value for name, value in vars(flags).items() if value is not None}
    if flags.num_processes is not None:
        n = flags.num_processes
        require(n >= 1, f"num_processes {n} is out of range; allowed: >= 1")
        if n == 1 and flags.process_id in (None, 0):
            return Membership()
    found = _from_launcher(environ)
    if found and given.keys() <= {"coordinator"}:
        member = Membership(found[2], found[1], flags.coordinator, found[0])
    elif not given:
        return Membership()
    else:
        names = [field.name for field in dataclasses.fields(ProcessFlags)]
        missing = [name for name in names if name not in given]
        require(
            not missing,
            f"{', '.join(given)} given without {', '.join(missing)}; allowed: all three, or none "
            "(one process, or what SLURM or Open MPI say)",
        )
        assert flags.process_id is not None
        assert flags.num_processes is not None
        member = Membership(flags.process_id, flags.num_processes, flags.coordinator)
    require(
        0 <= member.index < member.count,
        f"process_id {member.index} is out of range; allowed: 0..{member.count - 1}",
    )
    if member.coordinator is not None:
        _split_address(member.coordinator)
    return member


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    is_right = host and port.isdecimal() and 1 <= int(port) <= 65535
    require(
        bool(is_right),
        f"coordinator {address!r} is no HOST:PORT; for instance 10.0.0.1:12345",
    )
    return host.strip("[]"), int(port)


def _wait_for_coordinator(address: str, timeout_s: float) -> None:
    """Returns once the coordinator's port answers: JAX's own failure to connect is an abort."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(_split_address(address), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"coordinator {address} cannot be reached within {timeout_s:.0f} s: "
                    f"{error.strerror or error}; is process 0 running?"
                ) from error
        time.sleep(0.2)


class ProcessGroup:
    """The processes of one job, seen from one of them; without arguments, a process alone.

    Attributes:
      index: Of this process.
      count: Of processes.
      is_first: Whether this is the one that writes what is written once.
    """

    def __init__(
        self,
        member: Membership = _SINGLE,
        client: Any = None,
        witness: Witness | None = None,
    ):
        """Use `open_group`; client is JAX's connection to the coordinator."""
        self.index, self.count, self.is_first = member.index, member.count, member.index == 0
        self._client, self._witness = client, witness
        self._num_meetings = 0

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"

    def _key(self, name: str) -> str:
        self._num_meetings += 1  # every process comes to the same meetings in the same order
        return f"mimo_jax/{self._num_meetings}/{name}"

    def barrier(self, name: str) -> None:
        """Waits until every process has come here, however long that takes."""
        if self._client is not None:
            self._client.wait_at_barrier(self._key(name), _FOREVER_MS)

    def share(self, name: str, value: Any = None) -> Any:
        """The first process's value, on every process; a small one, that JSON can hold."""
        if self._client is None:
            return value
        key = self._key(name)
        if self.is_first:
            self._client.key_value_set(key, json.dumps(value))
            return value
        return json.loads(self._client.blocking_key_value_get(key, _FOREVER_MS))

    def gather(self, name: str, value: Any) -> list[Any]:
        """Every process's value in order, on the first process; [] on the others."""
        if self._client is None:
            return [value]
        key = self._key(name)
        self._client.key_value_set(f"{key}/{self.index}", json.dumps(value))
        if not self.is_first:
            return []
        keys = [f"{key}/{i}" for i in range(self.count)]
        return [json.loads(self._client.blocking_key_value_get(k, _FOREVER_MS)) for k in keys]

    def losses(self) -> tuple[type[Exception], ...]:
        """What JAX raises when another process is gone: nothing that a process alone could meet."""
        return (RuntimeError, ValueError) if self.count > 1 else ()

    def explain(self, error: BaseException) -> str:
        """An error in one line; if it says that another process is gone, with that first."""
        text = " ".join(str(error).split())
        if self.count == 1:
            return text
        signs = ("Gloo", "NCCL", "Barrier failed", "heartbeat", "coordination")
        if any(sign in text for sign in signs):
            return f"{self}: another process is gone ({text[:120]})"
        return f"{self}: {text}"

    def close(self, code: int = 0) -> int:
        """Waits for the others, then leaves the group; returns the exit code it is given."""
        if self._client is not None:
            import jax

            self.barrier("close")
            jax.distributed.shutdown()
            self._client = None
        if self._witness is not None:
            self._witness.dismiss()
            self._witness = None
        return code

    def abandon(self, line: str, code: int) -> None:
        """Ends this process at once, saying a line; returns if it is alone.

        The others notice within HEARTBEAT_TIMEOUT_S.
        """
        if self._witness is not None:
            self._witness.say_last(line)
            _end(code)


ALONE = ProcessGroup()


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # sys.exit would run JAX's shutdown, which waits for the others


def open_group(
    flags: ProcessFlags, program: str, join_timeout_s: float = JOIN_TIMEOUT_S
) -> ProcessGroup:
    """Joins the processes of a job; the first thing a program does with JAX.

    Args:
      flags: See there.
      program: Name of the program, for messages.
      join_timeout_s: How long the others may take to come.

    Raises:
      ConfigError: If the flags do not fit, or the coordinator cannot be reached or started. If it
        is there, but processes are missing, this process ends with one line (JAX aborts it).
    """
    member = membership(flags, os.environ)
    if member.count == 1:
        return ALONE
    name = f"{program}: process {member.index} of {member.count}"
    if member.index and member.coordinator is not None:
        _wait_for_coordinator(member.coordinator, join_timeout_s)
    witness = Witness(
        f"{name}: the group did not form within {join_timeout_s:.0f} s; start every process with "
        "the same coordinator and num_processes"
    )
    try:
        _initialize(member, join_timeout_s)
    except (RuntimeError, ValueError) as error:
        witness.dismiss()
        raise ConfigError(
            f"process {member.index} of {member.count}: cannot start or join the coordinator "
            f"{member.coordinator or f'that {member.launcher} names'}: {error}; name another "
            "HOST:PORT"
        ) from error
    from jax._src.distributed import global_state

    witness.say_last(f"{name}: stopped, for it or another process was killed")
    return ProcessGroup(member, global_state.client, witness)


def _initialize(member: Membership, join_timeout_s: float) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        member.coordinator,
        member.count,
        member.index,
        cluster_detection_method=member.launcher or "deactivate",
        initialization_timeout=int(join_timeout_s),
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=10,
    )
