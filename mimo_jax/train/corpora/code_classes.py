"""Generated small classes for scene `code-gen`: a state, and methods that the docstring lists."""

import random

from mimo_jax.train.corpora import code_words as words
from mimo_jax.train.corpora.document import maybe, pick

_KINDS = (
    "Box", "Stack", "Ledger", "Counter", "Register", "Basket", "Pool", "Journal", "Tracker",
    "Store", "Queue", "Meter", "Shelf", "Board", "Roster", "Log", "Cache", "Vault",
)  # fmt: skip


def write_class(rng: random.Random) -> tuple[str, str]:
    """Returns (class line and docstring, body) of one class that keeps items or amounts."""
    keeps_list = maybe(rng, 0.5)
    plural, singular = pick(rng, words.NUMBERS if keeps_list or maybe(rng, 0.5) else words.STRINGS)
    if singular == "name":  # the methods of a mapping already call their key so
        plural, singular = "aliases", "alias"
    kind = pick(rng, _KINDS)
    limit = rng.randint(3, 99)
    methods = _list_methods if keeps_list else _dict_methods
    chosen = methods(rng, plural, singular, limit)
    empty = "[]" if keeps_list else "{}"
    has_limit = any("self.limit" in line for _, lines in chosen for line in lines)
    body = [f"def __init__(self{f', limit={limit}' if has_limit else ''}):"]
    body.append(f"    self.{plural} = {empty}")
    if has_limit:
        body.append("    self.limit = limit")
    for _, lines in chosen:
        body += ["", *lines]
    first = "Keeps a list of" if keeps_list else "Maps names to"
    doc = [f"{first} {plural}" + (f", {limit} at most by default." if has_limit else ".")]
    doc += ["", *(said for said, _ in chosen)]
    name = singular.capitalize() + kind
    head = f"class {name}:\n    " + '"""' + "\n    ".join(doc).replace("\n    \n", "\n\n")
    return head + '\n    """\n', "\n".join("    " + line if line else "" for line in body)


def _list_methods(rng, plural, singular, limit):
    k, low = rng.randint(2, 9), rng.randint(1, 20)
    full = pick(rng, ("return False", 'raise ValueError("full")', f"self.{plural}.pop(0)"))
    full_said = {"r": "fails", "s": "drops the first"}[full[0]]
    if full.startswith("return"):
        full_said = "returns False"
    add = [
        f"def add(self, {singular}):",
        f"    if len(self.{plural}) >= self.limit:",
        f"        {full}",
        f"    self.{plural}.append({singular})",
    ] + (["    return True"] if full.startswith("return") else [])
    plain_add = [f"def add(self, {singular}):", f"    self.{plural}.append({singular})"]
    options = [
        ("total: the sum", ["def total(self):", f"    return sum(self.{plural})"]),
        (
            f"mean: the average, {low} when empty",
            [
                "def mean(self):",
                f"    if not self.{plural}:",
                f"        return {low}",
                f"    return sum(self.{plural}) / len(self.{plural})",
            ],
        ),
        (
            f"last: the newest {k} entries",
            [f"def last(self, count={k}):", f"    return self.{plural}[-count:]"],
        ),
        (
            "best: the largest or None",
            ["def best(self):", f"    return max(self.{plural}, default=None)"],
        ),
        (
            f"above: entries over a bound, {low} if not given",
            [
                f"def above(self, bound={low}):",
                f"    return [{singular} for {singular} in self.{plural} if {singular} > bound]",
            ],
        ),
        (
            "clear: empty it and return the old size",
            [
                "def clear(self):",
                f"    size = len(self.{plural})",
                f"    self.{plural} = []",
                "    return size",
            ],
        ),
        (
            f"scale: multiply all by a factor, {k} if not given",
            [
                f"def scale(self, factor={k}):",
                f"    self.{plural} = [{singular} * factor for {singular} in self.{plural}]",
            ],
        ),
        (
            "remove: drop one entry if present",
            [
                f"def remove(self, {singular}):",
                f"    if {singular} in self.{plural}:",
                f"        self.{plural}.remove({singular})",
            ],
        ),
    ]
    first = (f"add: appends, when full {full_said}", add)
    if maybe(rng, 0.4):
        first = ("add: appends", plain_add)
    return [first, *rng.sample(options, rng.randint(2, 4))]


def _dict_methods(rng, plural, singular, limit):
    start, low = rng.randint(0, 5), rng.randint(1, 20)
    sep = pick(rng, (": ", "=", " -> ", " is "))
    options = [
        (
            "total: the sum of all",
            ["def total(self):", f"    return sum(self.{plural}.values())"],
        ),
        (
            "names: the known names, sorted",
            ["def names(self):", f"    return sorted(self.{plural})"],
        ),
        (
            f"take: lower a {singular}, by 1 if not given, never under zero",
            [
                "def take(self, name, amount=1):",
                f"    left = self.{plural}.get(name, {start}) - amount",
                f"    self.{plural}[name] = max(left, 0)",
                f"    return self.{plural}[name]",
            ],
        ),
        (
            "rename: move an entry to a new name",
            [
                "def rename(self, old, new):",
                f"    if old in self.{plural}:",
                f"        self.{plural}[new] = self.{plural}.pop(old)",
            ],
        ),
        (
            f"lines: every entry written with '{sep}'",
            [
                "def lines(self):",
                f'    return [f"{{name}}{sep}{{{singular}}}" '
                f"for name, {singular} in self.{plural}.items()]",
            ],
        ),
        (
            "top: the name with the most, None if empty",
            [
                "def top(self):",
                f"    if not self.{plural}:",
                "        return None",
                f"    return max(self.{plural}, key=self.{plural}.get)",
            ],
        ),
        (
            f"drop_below: delete entries under a bound, {low} if not given",
            [
                f"def drop_below(self, bound={low}):",
                f"    for name in list(self.{plural}):",
                f"        if self.{plural}[name] < bound:",
                f"            del self.{plural}[name]",
            ],
        ),
    ]
    adders = [
        (
            f"add: adds to a {singular}, starting at {start}",
            [
                f"def add(self, name, {singular}):",
                f"    old = self.{plural}.get(name, {start})",
                f"    self.{plural}[name] = old + {singular}",
            ],
        ),
        (
            "add: stores one, KeyError when the name is taken",
            [
                f"def add(self, name, {singular}):",
                f"    if name in self.{plural}:",
                "        raise KeyError(name)",
                f"    self.{plural}[name] = {singular}",
            ],
        ),
        (
            "add: stores one unless the limit is reached",
            [
                f"def add(self, name, {singular}):",
                f"    if len(self.{plural}) < self.limit:",
                f"        self.{plural}[name] = {singular}",
            ],
        ),
    ]
    return [pick(rng, adders), *rng.sample(options, rng.randint(2, 4))]
