"""A generated Python function while it is being written (scene `code-gen`)."""

import dataclasses
import random

from mimo_jax.train.corpora.document import maybe


@dataclasses.dataclass
class Draft:
    """A function being written: current variable, its kind, the docstring and body so far."""

    rng: random.Random
    kind: str
    var: str
    item: str
    fields: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())
    params: list[str] = dataclasses.field(default_factory=list)
    doc: list[str] = dataclasses.field(default_factory=list)
    body: list[str] = dataclasses.field(default_factory=list)
    used: set[str] = dataclasses.field(default_factory=set)

    def add(self, doc: str, *lines: str) -> None:
        """Appends one docstring sentence and its lines of code."""
        self.doc.append(doc)
        self.body.extend(lines)

    def name(self, *options: str) -> str:
        """Returns an unused variable name, the first of the options where possible.

        A code base has conventions: the same step calls its result the same.
        """
        free = [option for option in options if option not in self.used]
        name = free[0] if free else f"{options[0]}_{len(self.used)}"
        self.used.add(name)
        return name

    def become(self, kind: str, var: str, item: str | None = None) -> None:
        """Makes var the current variable."""
        self.kind, self.var = kind, var
        self.item = item or self.item

    def bound(self, low: int, high: int, name: str) -> tuple[str, str]:
        """Returns (code, words) of a constant, which in a third of the cases is a parameter."""
        number = str(self.rng.randint(low, high))
        if maybe(self.rng, 0.35) and name not in self.used:
            self.used.add(name)
            self.params.append(f"{name}={number}")
            return name, name
        return number, number
