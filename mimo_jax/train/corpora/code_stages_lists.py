"""Stages of generated functions that work on records and on numbers; see `code_stages`."""

from mimo_jax.train.corpora import code_words as words
from mimo_jax.train.corpora.code_draft import Draft
from mimo_jax.train.corpora.document import maybe, pick


def guard_empty(d: Draft) -> None:
    """Leaves early on empty input."""
    default = pick(d.rng, ("None", "0", "[]", "{}", '""'))
    if maybe(d.rng, 0.5):
        d.add(f"Return {default} for no {d.var}.", f"if not {d.var}:", f"    return {default}")
    else:
        d.add(
            f"Empty {d.var} raise ValueError.",
            f"if not {d.var}:",
            f'    raise ValueError("{d.var} must not be empty")',
        )


def _record_test(d: Draft) -> tuple[str, str, str]:
    """Returns (condition, its negation, words) on one record named d.item."""
    nums, texts, flags = d.fields
    roll = d.rng.randrange(4)
    if roll == 0:
        flag = pick(d.rng, flags)
        return f'{d.item}["{flag}"]', f'not {d.item}["{flag}"]', f"marked {flag}"
    if roll == 1:
        flag = pick(d.rng, flags)
        return f'not {d.item}["{flag}"]', f'{d.item}["{flag}"]', f"not marked {flag}"
    num = pick(d.rng, nums)
    if roll == 2:
        code, said = d.bound(2, 90, f"min_{num}")
        return (
            f'{d.item}["{num}"] >= {code}',
            f'{d.item}["{num}"] < {code}',
            (f"with {num} at least {said}"),
        )
    code, said = d.bound(10, 200, f"max_{num}")
    return (
        f'{d.item}["{num}"] <= {code}',
        f'{d.item}["{num}"] > {code}',
        (f"with {num} up to {said}"),
    )


def records_filter(d: Draft) -> None:
    """Keeps some records, by a loop or a comprehension as the sentence says."""
    test, negated, said = _record_test(d)
    var = d.name("kept", "chosen", f"good_{d.var}", "selected", "result")
    if maybe(d.rng, 0.5):
        d.add(f"Keep {d.item}s {said}.", f"{var} = [{d.item} for {d.item} in {d.var} if {test}]")
    elif maybe(d.rng, 0.5):
        d.add(
            f"Loop over the {d.var} and skip those not {said}.",
            f"{var} = []",
            f"for {d.item} in {d.var}:",
            f"    if {negated}:",
            "        continue",
            f"    {var}.append({d.item})",
        )
    else:
        d.add(
            f"Walk through and collect each {d.item} {said}.",
            f"{var} = []",
            f"for {d.item} in {d.var}:",
            f"    if {test}:",
            f"        {var}.append({d.item})",
        )
    d.become("records", var)


def records_sort(d: Draft) -> None:
    """Sorts records by one field."""
    field = pick(d.rng, d.fields[0] + d.fields[1])
    var = d.name("ordered", "ranked", "sorted_items", "queue")
    down = maybe(d.rng, 0.5)
    tail = ", reverse=True" if down else ""
    said = f"Order by {field}, largest first." if down else f"Sort by {field}."
    short = d.item[0]
    lines = [f'{var} = sorted({d.var}, key=lambda {short}: {short}["{field}"]{tail})']
    if maybe(d.rng, 0.4):
        code, said_n = d.bound(2, 9, "top")
        said = said[:-1] + f" and take the first {said_n}."
        lines.append(f"{var} = {var}[:{code}]")
    d.add(said, *lines)
    d.become("records", var)


def records_update(d: Draft) -> None:
    """Computes one field of every record from others."""
    a, b = d.rng.sample(d.fields[0], 2)
    flag = pick(d.rng, d.fields[2])
    new = pick(d.rng, ("total", "fee", "bonus", "limit", "share", "load"))
    code, said = d.bound(2, 30, "rate")
    op, op_said = pick(d.rng, (("+", "plus"), ("*", "times"), ("-", "minus")))
    lines = [f"for {d.item} in {d.var}:"]
    if maybe(d.rng, 0.5):
        text = f"Set {new} to {a} {op_said} {b}, adding {said} when {flag}."
        lines += [
            f'    {new} = {d.item}["{a}"] {op} {d.item}["{b}"]',
            f'    if {d.item}["{flag}"]:',
            f"        {new} += {code}",
            f'    {d.item}["{new}"] = {new}',
        ]
    else:
        text = f"Set {new} to {a} {op_said} {b} if {flag}, else to {said}."
        lines += [
            f'    if {d.item}["{flag}"]:',
            f'        {d.item}["{new}"] = {d.item}["{a}"] {op} {d.item}["{b}"]',
            "    else:",
            f'        {d.item}["{new}"] = {code}',
        ]
    d.add(text, *lines)


def records_to_numbers(d: Draft) -> None:
    """Reads one numeric field, perhaps changed."""
    nums, _, flags = d.fields
    field, flag = pick(d.rng, nums), pick(d.rng, flags)
    var = d.name("numbers", f"{field}_list", "amounts", f"all_{field}")
    roll = d.rng.randrange(3)
    if roll == 0:
        d.add(
            f"Take the {field} of each.", f'{var} = [{d.item}["{field}"] for {d.item} in {d.var}]'
        )
    elif roll == 1:
        code, said = d.bound(2, 9, "factor")
        d.add(
            f"Gather each {field}, multiplied by {said} when {flag}.",
            f"{var} = []",
            f"for {d.item} in {d.var}:",
            f'    {field} = {d.item}["{field}"]',
            f'    if {d.item}["{flag}"]:',
            f"        {field} *= {code}",
            f"    {var}.append({field})",
        )
    else:
        default = d.rng.randint(0, 3)
        d.add(
            f"Read every {field}, using {default} when missing.",
            f'{var} = [{d.item}.get("{field}", {default}) for {d.item} in {d.var}]',
        )
    d.become("numbers", var, field)


def records_to_strings(d: Draft) -> None:
    """Formats one line per record."""
    num, text = pick(d.rng, d.fields[0]), pick(d.rng, d.fields[1])
    var = d.name("lines", "labels", "rows", "output")
    sep = pick(d.rng, (": ", " - ", "=", " has ", " / "))
    shape = f"f\"{{{d.item}['{text}']}}{sep}{{{d.item}['{num}']}}\""
    if maybe(d.rng, 0.5):
        d.add(
            f"Write each as {text}{sep}{num}.",
            f"{var} = [{shape} for {d.item} in {d.var}]",
        )
    else:
        flag = pick(d.rng, d.fields[2])
        mark = pick(d.rng, ("*", "!", "?", "+"))
        d.add(
            f"One line {text}{sep}{num} per {d.item}, with {mark} after those {flag}.",
            f"{var} = []",
            f"for {d.item} in {d.var}:",
            f"    line = {shape}",
            f'    if {d.item}["{flag}"]:',
            f'        line += "{mark}"',
            f"    {var}.append(line)",
        )
    d.become("strings", var, "line")


def records_to_mapping(d: Draft) -> None:
    """Groups records by a text field."""
    num, text = pick(d.rng, d.fields[0]), pick(d.rng, d.fields[1])
    var = d.name("groups", f"by_{text}", "table", "result")
    head = [f"{var} = {{}}", f"for {d.item} in {d.var}:", f'    {text} = {d.item}["{text}"]']
    roll = d.rng.randrange(4)
    if roll == 0:
        d.add(
            f"Add up the {num} per {text}.",
            *head,
            f'    {var}[{text}] = {var}.get({text}, 0) + {d.item}["{num}"]',
        )
    elif roll == 1:
        d.add(
            f"Count the {d.item}s of every {text}.",
            *head,
            f"    if {text} not in {var}:",
            f"        {var}[{text}] = 0",
            f"    {var}[{text}] += 1",
        )
    elif roll == 2:
        d.add(
            f"Remember the largest {num} for each {text}.",
            *head,
            f'    if {text} not in {var} or {d.item}["{num}"] > {var}[{text}]:',
            f'        {var}[{text}] = {d.item}["{num}"]',
        )
    else:
        low, high = d.rng.sample(range(1, 9), 2)
        flag = pick(d.rng, d.fields[2])
        d.add(
            f"Give every {text} {low} points, or {high} if {flag}, and add them.",
            *head,
            f'    points = {high} if {d.item}["{flag}"] else {low}',
            f"    {var}[{text}] = {var}.get({text}, 0) + points",
        )
    d.become("mapping", var, text)


def numbers_filter(d: Draft) -> None:
    """Keeps some numbers."""
    var = d.name("kept", "valid", "chosen", "rest", "clean")
    roll = d.rng.randrange(4)
    if roll == 0:
        code, said = d.bound(2, 60, "limit")
        test, text = f"{d.item} > {code}", f"above {said}"
    elif roll == 1:
        code, said = d.bound(10, 99, "ceiling")
        test, text = f"{d.item} < {code}", f"below {said}"
    elif roll == 2:
        k = d.rng.randint(2, 9)
        test, text = f"{d.item} % {k} == 0", f"divisible by {k}"
    else:
        low, high = d.rng.randint(0, 20), d.rng.randint(30, 99)
        test, text = f"{low} <= {d.item} <= {high}", f"from {low} to {high}"
    if maybe(d.rng, 0.5):
        d.add(f"Keep numbers {text}.", f"{var} = [{d.item} for {d.item} in {d.var} if {test}]")
    else:
        d.add(
            f"Loop and collect numbers {text}.",
            f"{var} = []",
            f"for {d.item} in {d.var}:",
            f"    if {test}:",
            f"        {var}.append({d.item})",
        )
    d.become("numbers", var)


def numbers_map(d: Draft) -> None:
    """Changes every number."""
    var = d.name("scaled", "changed", "shifted", "mapped", "fixed")
    roll = d.rng.randrange(6)
    if roll == 0:
        code, said = d.bound(2, 20, "factor")
        d.add(f"Multiply all by {said}.", f"{var} = [{d.item} * {code} for {d.item} in {d.var}]")
    elif roll == 1:
        code, said = d.bound(1, 50, "offset")
        d.add(f"Add {said} to each.", f"{var} = [{d.item} + {code} for {d.item} in {d.var}]")
    elif roll == 2:
        low, high = d.rng.randint(0, 9), d.rng.randint(20, 99)
        d.add(
            f"Clamp to {low}..{high}.",
            f"{var} = [max({low}, min({high}, {d.item})) for {d.item} in {d.var}]",
        )
    elif roll == 3:
        d.add(
            "Replace by running totals.",
            f"{var} = []",
            "running = 0",
            f"for {d.item} in {d.var}:",
            f"    running += {d.item}",
            f"    {var}.append(running)",
        )
    elif roll == 4:
        is_signed = maybe(d.rng, 0.5)
        step = "right - left" if is_signed else "abs(right - left)"
        d.add(
            f"Use the {'differences' if is_signed else 'distances'} of neighbours.",
            f"{var} = []",
            f"for left, right in zip({d.var}, {d.var}[1:]):",
            f"    {var}.append({step})",
        )
    else:
        code, said = d.bound(5, 60, "cutoff")
        a, b = d.rng.randint(2, 9), d.rng.randint(1, 9)
        d.add(
            f"Divide by {a} when over {said}, otherwise subtract {b}.",
            f"{var} = []",
            f"for {d.item} in {d.var}:",
            f"    if {d.item} > {code}:",
            f"        {var}.append({d.item} / {a})",
            "    else:",
            f"        {var}.append({d.item} - {b})",
        )
    d.become("numbers", var)


def numbers_to_number(d: Draft) -> None:
    """Reduces numbers to one."""
    var = d.name("total", "result", "answer", "outcome", "final")
    roll = d.rng.randrange(7)
    if roll == 0:
        d.add("Sum them.", f"{var} = sum({d.var})")
    elif roll == 1:
        d.add(
            "Take the mean, 0 if there are none.",
            f"{var} = sum({d.var}) / len({d.var}) if {d.var} else 0",
        )
    elif roll == 2:
        start = d.rng.randint(0, 5)
        d.add(
            f"Add the squares, starting from {start}.",
            f"{var} = {start}",
            f"for {d.item} in {d.var}:",
            f"    {var} += {d.item} * {d.item}",
        )
    elif roll == 3:
        mod = pick(d.rng, (7, 10, 11, 13, 97, 100, 101, 256, 1000))
        code, said = d.bound(2, 31, "base")
        d.add(
            f"Fold with base {said} modulo {mod}.",
            f"{var} = 0",
            f"for {d.item} in {d.var}:",
            f"    {var} = ({var} * {code} + {d.item}) % {mod}",
        )
    elif roll == 4:
        d.add(
            "Find the largest by hand, None if there is none.",
            f"{var} = None",
            f"for {d.item} in {d.var}:",
            f"    if {var} is None or {d.item} > {var}:",
            f"        {var} = {d.item}",
        )
    elif roll == 5:
        code, said = d.bound(3, 50, "limit")
        d.add(
            f"Add until the sum passes {said}, then stop.",
            f"{var} = 0",
            f"for {d.item} in {d.var}:",
            f"    {var} += {d.item}",
            f"    if {var} > {code}:",
            "        break",
        )
    else:
        d.add("Take the spread, highest minus lowest.", f"{var} = max({d.var}) - min({d.var})")
    d.become("number", var)


def numbers_to_mapping(d: Draft) -> None:
    """Puts numbers into buckets."""
    var = d.name("buckets", "bins", "histogram", "groups")
    width = d.rng.choice((2, 3, 4, 5, 10, 20, 25, 50))
    if maybe(d.rng, 0.5):
        d.add(
            f"Count them in buckets of width {width}.",
            f"{var} = {{}}",
            f"for {d.item} in {d.var}:",
            f"    bucket = {d.item} // {width}",
            f"    {var}[bucket] = {var}.get(bucket, 0) + 1",
        )
    else:
        low, middle, high = pick(d.rng, words.GRADES)
        a, b = sorted(d.rng.sample(range(3, 80), 2))
        d.add(
            f"Count {low} (under {a}), {middle} (under {b}) and {high} ones.",
            f'{var} = {{"{low}": 0, "{middle}": 0, "{high}": 0}}',
            f"for {d.item} in {d.var}:",
            f"    if {d.item} < {a}:",
            f'        {var}["{low}"] += 1',
            f"    elif {d.item} < {b}:",
            f'        {var}["{middle}"] += 1',
            "    else:",
            f'        {var}["{high}"] += 1',
        )
    d.become("mapping", var, "bucket")
