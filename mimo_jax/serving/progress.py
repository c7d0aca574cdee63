"""The bar of a running job, on stderr, so that stdout may carry the answers."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TransferSpeedColumn,
)


@contextlib.contextmanager
def loading_bar(is_quiet: bool) -> Iterator[Callable[[int, int], object]]:
    """A bar in bytes for reading a checkpoint; gives the function that `LLM.load` reports to.

    Example: `with loading_bar(False) as report: LLM.load(path, on_progress=report)`.
    """
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    )
    console = Console(stderr=True)
    is_hidden = is_quiet or not console.is_terminal  # a log wants no bar, an error one line
    with Progress(*columns, console=console, disable=is_hidden, transient=True) as progress:
        task = progress.add_task("loading", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class JobBar:
    """Done/total, tokens per second and accept length; shows nothing when quiet.

    Example: `with JobBar(10, is_quiet=False) as bar: bar.update(1, tokens_per_s=80.0, tau=4.2)`.
    """

    def __init__(self, num_lines: int, is_quiet: bool):
        """Prepares a bar for a job of num_lines lines."""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True),
            disable=is_quiet,
        )
        self._task = self._progress.add_task("compiling", total=num_lines, figures="")

    def __enter__(self) -> "JobBar":
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def update(self, num_done: int, tokens_per_s: float, tau: float | None) -> None:
        """Shows where the job stands; tau None means that no step is known yet."""
        figures = f"{tokens_per_s:.1f} tokens/s" + ("" if tau is None else f"  τ {tau:.2f}")
        self._progress.update(
            self._task, description="decoding", completed=num_done, figures=figures
        )
