"""Stages of generated functions that work on strings, mappings and results; see `code_stages`."""

from mimo_jax.train.corpora import code_words as words
from mimo_jax.train.corpora.code_draft import Draft
from mimo_jax.train.corpora.document import maybe, pick


def strings_clean(d: Draft) -> None:
    """Cleans or filters strings."""
    var = d.name("cleaned", "kept", "tidy", "result", "usable")
    roll = d.rng.randrange(6)
    if roll == 0:
        d.add(
            "Strip and lower each, dropping blanks.",
            f"{var} = []",
            f"for {d.item} in {d.var}:",
            f"    {d.item} = {d.item}.strip().lower()",
            f"    if {d.item}:",
            f"        {var}.append({d.item})",
        )
    elif roll == 1:
        code, said = d.bound(2, 12, "min_len")
        d.add(
            f"Keep those of at least {said} letters.",
            f"{var} = [{d.item} for {d.item} in {d.var} if len({d.item}) >= {code}]",
        )
    elif roll == 2:
        prefix = pick(d.rng, words.PREFIXES)
        cut = maybe(d.rng, 0.5)
        d.add(
            f"Drop those that start with {prefix}." if not cut else f"Cut off a leading {prefix}.",
            f'{var} = [{d.item} for {d.item} in {d.var} if not {d.item}.startswith("{prefix}")]'
            if not cut
            else f'{var} = [{d.item}.removeprefix("{prefix}") for {d.item} in {d.var}]',
        )
    elif roll == 3:
        seen = d.name("seen", "known")
        d.add(
            "Remove repeats but keep the order.",
            f"{seen} = set()",
            f"{var} = []",
            f"for {d.item} in {d.var}:",
            f"    if {d.item} not in {seen}:",
            f"        {seen}.add({d.item})",
            f"        {var}.append({d.item})",
        )
    elif roll == 4:
        down = maybe(d.rng, 0.5)
        d.add(
            "Sort by length, longest first." if down else "Sort by length, then by letters.",
            f"{var} = sorted({d.var}, key=len, reverse=True)"
            if down
            else f"{var} = sorted({d.var}, key=lambda s: (len(s), s))",
        )
    else:
        method, said = pick(
            d.rng, (("upper", "upper case"), ("title", "title case"), ("capitalize", "capitals"))
        )
        d.add(f"Turn into {said}.", f"{var} = [{d.item}.{method}() for {d.item} in {d.var}]")
    d.become("strings", var)


def strings_number(d: Draft) -> None:
    """Numbers the strings."""
    var = d.name("numbered", "listing", "marked")
    start = d.rng.randint(0, 3)
    sep = pick(d.rng, (". ", ") ", ": ", " "))
    d.add(
        f"Put a number from {start} and '{sep}' before each.",
        f"{var} = []",
        f"for i, {d.item} in enumerate({d.var}, start={start}):",
        f'    {var}.append(f"{{i}}{sep}{{{d.item}}}")',
    )
    d.become("strings", var)


def strings_to_mapping(d: Draft) -> None:
    """Counts or indexes strings."""
    var = d.name("counts", "table", "index", "groups")
    roll = d.rng.randrange(3)
    if roll == 0:
        d.add(
            "Count how often each occurs.",
            f"{var} = {{}}",
            f"for {d.item} in {d.var}:",
            f"    {var}[{d.item}] = {var}.get({d.item}, 0) + 1",
        )
        d.become("mapping", var)
    elif roll == 1:
        d.add(
            "Map each to its length.",
            f"{var} = {{{d.item}: len({d.item}) for {d.item} in {d.var}}}",
        )
        d.become("mapping", var)
    else:
        d.add(
            "Count them by first letter.",
            f"{var} = {{}}",
            f"for {d.item} in {d.var}:",
            f'    first = {d.item}[0] if {d.item} else ""',
            f"    {var}[first] = {var}.get(first, 0) + 1",
        )
        d.become("mapping", var, "first")


def strings_to_numbers(d: Draft) -> None:
    """Parses numbers out of strings."""
    var = d.name("numbers", "parsed", "found")
    if maybe(d.rng, 0.5):
        kind = pick(d.rng, ("int", "float"))
        bad = pick(d.rng, ("continue", f"{var}.append(0)"))
        said = "skipping bad ones" if bad == "continue" else "using 0 for bad ones"
        d.add(
            f"Convert to {kind}, {said}.",
            f"{var} = []",
            f"for {d.item} in {d.var}:",
            "    try:",
            f"        {var}.append({kind}({d.item}))",
            "    except ValueError:",
            f"        {bad}",
        )
    else:
        d.add("Measure the lengths.", f"{var} = [len({d.item}) for {d.item} in {d.var}]")
    d.become("numbers", var, "number")


def strings_to_string(d: Draft) -> None:
    """Joins strings or picks one."""
    var = d.name("joined", "text_out", "summary", "result")
    if maybe(d.rng, 0.7):
        sep = pick(d.rng, words.SEPARATORS)
        d.add(f"Join them with '{sep}'.", f'{var} = "{sep}".join({d.var})')
    else:
        d.add(
            "Find the longest.",
            f'{var} = ""',
            f"for {d.item} in {d.var}:",
            f"    if len({d.item}) > len({var}):",
            f"        {var} = {d.item}",
        )
    d.become("string", var)


def mapping_change(d: Draft) -> None:
    """Filters or scales a mapping."""
    var = d.name("trimmed", "changed", "remaining", "scaled")
    value = d.name("number", "count_value", "val")
    d.used.discard(value)
    roll = d.rng.randrange(3)
    if roll == 0:
        code, said = d.bound(2, 60, "floor")
        d.add(
            f"Drop entries under {said}.",
            f"{var} = {{}}",
            f"for {d.item}, {value} in {d.var}.items():",
            f"    if {value} >= {code}:",
            f"        {var}[{d.item}] = {value}",
        )
    elif roll == 1:
        code, said = d.bound(2, 12, "factor")
        d.add(
            f"Multiply the entries by {said}.",
            f"{var} = {{{d.item}: {value} * {code} for {d.item}, {value} in {d.var}.items()}}",
        )
    else:
        low, middle, high = pick(d.rng, words.GRADES)
        a, b = sorted(d.rng.sample(range(3, 80), 2))
        d.add(
            f"Remove entries over {b} and lift those below {a} to {a}.",
            f"{var} = {{}}",
            f"for {d.item}, {value} in {d.var}.items():",
            f"    if {value} > {b}:",
            "        continue",
            f"    {var}[{d.item}] = max({value}, {a})",
        )
    d.become("mapping", var)


def mapping_to_strings(d: Draft) -> None:
    """Formats the entries of a mapping."""
    var = d.name("lines", "report", "output")
    sep = pick(d.rng, (": ", " = ", " -> ", "=", "\\t"))
    order, said = pick(
        d.rng,
        (
            (f"sorted({d.var}.items())", "sorted"),
            (f"{d.var}.items()", "in order"),
            (f"reversed({d.var}.items())", "reversed"),
        ),
    )
    d.add(
        f"Format entries {said} with '{sep}' between.",
        f"{var} = []",
        f"for {d.item}, value in {order}:",
        f'    {var}.append(f"{{{d.item}}}{sep}{{value}}")',
    )
    d.become("strings", var, "line")


def mapping_to_number(d: Draft) -> None:
    """Reduces a mapping to a number."""
    var = d.name("total", "result", "amount_out")
    code, said = pick(
        d.rng,
        (
            (f"sum({d.var}.values())", "Add all entries."),
            (f"max({d.var}.values(), default=0)", "Take the highest entry or 0."),
            (f"len({d.var})", "Count the entries."),
            (f"min({d.var}.values(), default=0)", "Take the lowest entry or 0."),
        ),
    )
    d.add(said, f"{var} = {code}")
    d.become("number", var)


def mapping_to_string(d: Draft) -> None:
    """Finds the key of the largest entry."""
    var = d.name("best", "winner", "top_key")
    if maybe(d.rng, 0.5):
        d.add("Find the key with the highest entry.", f"{var} = max({d.var}, key={d.var}.get)")
    else:
        d.add(
            "Search for the smallest entry's key.",
            f"{var} = None",
            f"for {d.item}, value in {d.var}.items():",
            f"    if {var} is None or value < {d.var}[{var}]:",
            f"        {var} = {d.item}",
        )
    d.become("string", var)


def number_change(d: Draft) -> None:
    """Adjusts one number."""
    roll = d.rng.randrange(4)
    v = d.var
    if roll == 0:
        code, said = d.bound(20, 400, "cap")
        d.add(f"Cap the {v} at {said}.", f"if {v} > {code}:", f"    {v} = {code}")
    elif roll == 1:
        digits = d.rng.randint(1, 4)
        d.add(f"Round to {digits} digits.", f"{v} = round({v}, {digits})")
    elif roll == 2:
        code, said = d.bound(2, 90, "fee")
        big, small = d.rng.randint(100, 500), d.rng.randint(10, 50)
        d.add(
            f"Subtract {said} when over {big}, add it when under {small}.",
            f"if {v} > {big}:",
            f"    {v} -= {code}",
            f"elif {v} < {small}:",
            f"    {v} += {code}",
        )
    else:
        rounds, k = d.rng.randint(2, 6), d.rng.randint(2, 9)
        d.add(
            f"Halve it {rounds} times, adding {k} each time.",
            f"for _ in range({rounds}):",
            f"    {v} = {v} // 2 + {k}",
        )


def number_to_string(d: Draft) -> None:
    """Names the size of a number."""
    var = d.name("label", "grade", "status", "verdict")
    low, middle, high = pick(d.rng, words.GRADES)
    a, b = sorted(d.rng.sample(range(5, 200), 2))
    d.add(
        f"Call it {low} below {a}, {middle} below {b}, else {high}.",
        f"if {d.var} < {a}:",
        f'    {var} = "{low}"',
        f"elif {d.var} < {b}:",
        f'    {var} = "{middle}"',
        "else:",
        f'    {var} = "{high}"',
    )
    d.become("string", var)


def string_change(d: Draft) -> None:
    """Adjusts one string."""
    v = d.var
    roll = d.rng.randrange(3)
    if roll == 0:
        code, said = d.bound(8, 60, "width")
        d.add(f"Cut to {said} characters.", f"if len({v}) > {code}:", f"    {v} = {v}[:{code}]")
    elif roll == 1:
        prefix = pick(d.rng, words.PREFIXES)
        d.add(f"Put '{prefix}: ' in front.", f'{v} = f"{prefix}: {{{v}}}"')
    else:
        old, new = d.rng.sample((" ", "_", "-", ".", "/"), 2)
        d.add(f"Replace '{old}' by '{new}'.", f'{v} = {v}.replace("{old}", "{new}")')
