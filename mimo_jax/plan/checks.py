"""What must hold: published sizes that a plan reproduces, and what the decode program promises.

A check says what was promised and what was found, and never stops the others. The command line ends
with 1 if one fails.
"""

from typing import NamedTuple

from mimo_jax.plan import weights
from mimo_jax.plan.devices import find_device
from mimo_jax.plan.published import PublishedModel
from mimo_jax.plan.roofline import weight_bound
from mimo_jax.plan.weights import DRAFTER, EXPERTS, MTP, ClassBytes
from mimo_jax.plan.worker import ProgramFacts


class Check(NamedTuple):
    """One line: what is checked, what was promised, what was found."""

    name: str
    promised: str
    found: str
    holds: bool


def _near(name: str, promised: float, found: float, unit: str = "GB", within: float = 0.005):
    text = f"{promised:,.2f} {unit} within {within:.1%}"
    return Check(name, text, f"{found:,.2f} {unit}", abs(found / promised - 1) <= within)


def _equal(name: str, promised: int, found: int):
    return Check(name, f"{promised:,}", f"{found:,}", promised == found)


# Sizes that others have published or counted. MTP heads: parameters of each; drafters: bytes.
MTP_PARAMETERS = {"MiMo-V2-Flash": 329_273_408, "MiMo-V2.5": 329_273_408,
                  "MiMo-V2.5-Pro": 644_905_088}  # fmt: skip
DRAFTER_BYTES = {"MiMo-V2.5": 2_936_114_304, "Qwen3-8B": 2 * 1_048_626_432}
PRO_EXPERTS_GB, PRO_TARGET_GB, PRO_ALL_GB = 531.35, 561.5, 570.0
# The weight-streaming bound of a Pro step of 8 tokens at accept length 6.30, and the share of it
# that 1,000 tokens/s are.
PRO_BOUND = {"h200": 2187.0, "b200": 3644.0}


def anchors(model: PublishedModel, rows: dict[str, ClassBytes]) -> list[Check]:
    """Published sizes of the models that have any, against the plan's own account.

    Source: sizes of the published repositories and their configs; MTP and drafter counts from the
      published shapes.
    """
    base = model.name.removesuffix(" + DFlash")
    found = []
    if base == "MiMo-V2.5-Pro":
        target_gb = weights.file_bytes(rows, MTP, DRAFTER) / 1e9
        found.append(_near("experts", PRO_EXPERTS_GB, rows[EXPERTS].file_bytes / 1e9))
        found.append(_near("target", PRO_TARGET_GB, target_gb))
        if DRAFTER in rows:
            all_gb = weights.file_bytes(rows) / 1e9
            found.append(_near("target, MTP heads and drafter", PRO_ALL_GB, all_gb))
        for name, promised in PRO_BOUND.items():
            bound = weight_bound(
                model, rows, find_device(name), num_tokens=8, num_devices=8, accept_length=6.30
            )
            line = f"bound of 8 x {name} (1000 tok/s is {1000 / bound:.1%} of it)"
            found.append(_near(line, promised, bound, "tok/s"))
    if base in MTP_PARAMETERS:
        number = weights.num_weights(weights.abstract_mtp_head(model.target))
        found.append(_equal("parameters of an MTP head", MTP_PARAMETERS[base], number))
    if base in DRAFTER_BYTES and DRAFTER in rows:
        found.append(
            _equal("bytes of the drafter", DRAFTER_BYTES[base], int(rows[DRAFTER].file_bytes))
        )
    return found


def promises(
    facts: ProgramFacts, *, num_layers: int, num_devices: int, cache_bytes: int
) -> list[Check]:
    """What a decode loop promises, read off the compiled program.

    Args:
      facts: Of the loop.
      num_layers: Layers that run in a step, the drafter's included.
      num_devices: Of the mesh.
      cache_bytes: Caches of one device; they are donated and must be written in place.
    """
    found = []
    if facts.is_one_graph is not None:
        listed = ", ".join(f"{n} {kind}" for kind, n in (facts.top_level or {}).items())
        found.append(
            Check(
                "one command buffer holds the loop",
                "1 and nothing beside it but copies",
                f"{facts.num_command_buffers}; at top level {listed}",
                facts.is_one_graph,
            )
        )
    if facts.num_launches is not None and facts.picked_from_bytes:
        per_layer = facts.num_launches / num_layers
        found.append(
            Check(
                "launches per layer, all-reduces included",
                f"at most {MOST_LAUNCHES_PER_LAYER}",
                f"{per_layer:.2f}",
                per_layer <= MOST_LAUNCHES_PER_LAYER,
            )
        )
        found.append(
            Check(
                "scratch memory of a step",
                f"at most {MOST_TEMP_BYTES / 1e6:.0f} MB",
                f"{facts.temp_bytes / 1e6:,.1f} MB",
                facts.temp_bytes <= MOST_TEMP_BYTES,
            )
        )
    copies = [name for name, _, _, depth in facts.large_copies if depth]
    found.append(
        Check(
            "no copy over 8 MB in the loop",
            "0",
            f"{len(copies)}" + (f" ({', '.join(copies[:3])})" if copies else ""),
            not copies,
        )
    )
    found.append(
        Check(
            "donated caches are written in place",
            f"at least {cache_bytes / 1e6:,.1f} MB aliased",
            f"{facts.alias_bytes / 1e6:,.1f} MB",
            facts.alias_bytes >= cache_bytes,
        )
    )
    if num_devices > 1:
        number, _ = facts.collectives.get("all-reduce", (0, 0))
        others = sorted(set(facts.collectives) - {"all-reduce"})
        most = 2 * num_layers + MOST_OTHER_ALL_REDUCES
        found.append(
            Check(
                "two all-reduces per layer",
                f"at most 2 x {num_layers} + {MOST_OTHER_ALL_REDUCES}",
                f"{number}",
                number <= most,
            )
        )
        found.append(
            Check("nothing is gathered", "no other collective", ", ".join(others) or "none",
                  not others)
        )  # fmt: skip
    return found


# With the kernels in; XLA alone has 25 to 30 launches and tens of megabytes.
MOST_LAUNCHES_PER_LAYER, MOST_TEMP_BYTES = 12, 64_000_000
# Embedding and choice of the target, of the drafter, its context fusion, and the rows' end.
MOST_OTHER_ALL_REDUCES = 6


def failed(checks: list[Check]) -> str | None:
    """One line about the checks that fail; None if all hold."""
    names = [check.name for check in checks if not check.holds]
    return f"not as promised: {'; '.join(names)}" if names else None

