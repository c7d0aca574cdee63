"""Signals that ask a run to stop, and where it may.

Problem: a scheduler sends SIGTERM and soon after SIGKILL; a person presses Ctrl-C. Both mean "end,
but lose nothing". Choice: in `raising_stop` a signal raises at once, which is right wherever files
are written whole or not at all; in `noting_signals`, which the training loop enters, it is only
noted, and the loop ends after the step at hand, once that is saved. A second one interrupts the
loop as Ctrl-C does everywhere.

`Stopped` is a KeyboardInterrupt so that no `except Exception` takes it for a failure: restoring
would count the checkpoint at hand as damaged.

Trap: Python runs handlers between two bytecodes of the main thread. A compilation of a minute is
finished first. Other threads have no signals: there `noting_signals` notes nothing.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(KeyboardInterrupt):
    """The run ends because it was asked to; the message says so in one line.

    Attributes:
      is_agreed: Whether every process of the group ends here, so that it may be left in order.
    """

    def __init__(self, line: str, is_agreed: bool = False):
        super().__init__(line)
        self.is_agreed = is_agreed


@contextlib.contextmanager
def _handling(handler: Callable) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def raising_stop() -> Iterator[None]:
    """Inside, SIGTERM and SIGINT raise `Stopped` wherever the main thread is."""

    def handler(number, frame):
        raise Stopped(f"stopped by {signal.Signals(number).name}")

    with _handling(handler):
        yield


@contextlib.contextmanager
def noting_signals() -> Iterator[Callable[[], str | None]]:
    """Inside, a first SIGTERM or SIGINT is only noted; a second one is a KeyboardInterrupt.

    Yields:
      () -> name of the signal that came, or None.

    Example: after os.kill(os.getpid(), signal.SIGTERM), the function says "SIGTERM".
    """
    noted: list[str] = []

    def handler(number, frame):
        if noted:
            raise KeyboardInterrupt
        noted.append(signal.Signals(number).name)

    with _handling(handler):
        yield lambda: noted[0] if noted else None
