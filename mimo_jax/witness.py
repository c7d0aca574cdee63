"""A child process that says in one line why its parent ended, when the parent cannot.

Problem: a process of a group that loses its coordinator is aborted inside JAX's C++ client, with
25 lines of stack trace and no way for Python to say anything (jax 0.12: a client whose stream to
the coordinator closes calls abort() within a millisecond, also with recoverability on, and a Python
callback in that place dies of std::bad_cast). A process that is killed says nothing at all.

Choice: file descriptor 2, where C++ writes, becomes a pipe to a small child process, while Python's
`sys.stderr` keeps the terminal. The child passes everything on, except what JAX writes about the
loss, which it holds back; when the pipe ends without a goodbye it prints the line it was given last
and what the held text says about the cause. Rejected: a launcher around the real process (a signal
sent to it would not reach the work, and progress bars would see a pipe); a heartbeat of our own
(JAX's abort is faster).

Run as a script by `Witness`; imports the standard library only.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from typing import TextIO, cast

# A line that begins so is no message but the line to say at the end; empty: say nothing.
_LAST_WORDS = b"\x01"
# What JAX writes when the group is broken; from there on all is held back.
_LOSS = re.compile(rb"coordination_service|JAX distributed service|preemption_sync_manager")


def cause(held: bytes) -> str:
    """What held-back text says about a loss, as the end of a sentence; "" if nothing.

    Example: b"...unhealthy (stopped sending heartbeats):\\n1\\n2\\nThe tasks..." -> " (lost contact
      with process 1, 2)".
    """
    silent = re.search(rb"stopped sending heartbeats\):\s*\n((?:\d+\s*\n)+)", held)
    if silent:
        ids = ", ".join(silent[1].decode().split())
        return f" (lost contact with process {ids})"
    if b"Failed to send RPC to coordination service" in held:
        return " (lost contact with process 0)"
    return ""


def listen(source: io.BufferedIOBase, sink: io.BufferedIOBase) -> None:
    """Passes lines from source to sink until the end, then says the last words."""
    words, held = b"", []
    for line in source:
        if line.startswith(_LAST_WORDS):
            words = line.removeprefix(_LAST_WORDS).strip()
            if not words:  # goodbye: what was held back was no loss
                sink.write(b"".join(held))
                held = []
        elif held or _LOSS.search(line):
            held.append(line)
        elif line != b"\n":  # `say_last` opens a new line, to be sure of one
            sink.write(line)
            sink.flush()
    if words:
        sink.write(words + cause(b"".join(held)).encode() + b"\n")
    sink.flush()


class Witness:
    """Stands by this process until `dismiss`.

    Args:
      words: The line to say if this process ends before.

    Example: `witness = Witness("train.py: lost"); ...; witness.dismiss()`.
    """

    def __init__(self, words: str):
        self._terminal: int = os.dup(2)
        self._python_stderr: TextIO = sys.stderr
        self._child = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        pipe = self._child.stdin
        assert pipe is not None
        self._python_stderr.flush()
        sys.stderr = os.fdopen(os.dup(self._terminal), "w", buffering=1, errors="backslashreplace")
        os.dup2(pipe.fileno(), 2)
        pipe.close()
        self.say_last(words)

    def say_last(self, words: str) -> None:
        """Replaces the line to say at the end."""
        with contextlib.suppress(OSError):  # the child may have been killed; this is no reason to
            os.write(2, b"\n" + _LAST_WORDS + " ".join(words.split()).encode() + b"\n")

    def dismiss(self) -> None:
        """Sends the child away; file descriptor 2 and `sys.stderr` are as before."""
        self.say_last("")
        sys.stderr.flush()
        os.dup2(self._terminal, 2)
        os.close(self._terminal)
        sys.stderr = self._python_stderr
        self._child.wait()


if __name__ == "__main__":
    listen(cast(io.BufferedIOBase, sys.stdin.buffer), cast(io.BufferedIOBase, sys.stderr.buffer))
