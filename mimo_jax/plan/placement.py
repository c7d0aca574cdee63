"""Which device holds what: weight -> logical axes -> mesh axes -> bytes per device.

The table behind `--only sharding`. Layers that say the same are one row, so that 70 layers read as
the handful of rules they are.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from mimo_jax.plan.published import PublishedModel
from mimo_jax.plan.weights import MTP, all_leaves, device_bytes
from mimo_jax.sharding import MODEL, AxisRules


class Placement(NamedTuple):
    """Parameters that are cut alike.

    Attributes:
      name: With * where the number of a layer stands.
      count: How many parameters.
      shape: Of each of them; with KV heads repeated where devices share them.
      axes: Logical axis of each dimension, "-" without a name.
      cut: Mesh axes that cut it, as "hidden over model"; "whole copy" if none does.
      device_bytes: Of all of them together, on one device.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    cut: str
    device_bytes: int


def placements(
    model: PublishedModel, rules: AxisRules, sizes: Mapping[str, int]
) -> list[Placement]:
    """Every loaded parameter, largest first.

    Raises:
      ConfigError: If the mesh does not divide a parameter.

    Example: (MiMo-V2.5-Pro, DECODE, 8 devices) -> first "layers.*.experts_down", 69 of
      384 x 6144 x 1024, expert_hidden over model.
    """
    found: dict[tuple, Placement] = {}
    for leaf in all_leaves(model, sizes.get(MODEL, 1)):
        if leaf.kind == MTP:
            continue
        name = re.sub(r"\.\d+\.", ".*.", leaf.name)
        num_bytes = device_bytes(leaf, rules, sizes)
        cuts = [
            f"{axis} over {' and '.join(rules.cuts[axis])}"
            for axis in leaf.axes
            if axis is not None and any(sizes[part] > 1 for part in rules.cuts.get(axis, ()))
        ]
        before = found.get((name, leaf.cut_shape))
        found[name, leaf.cut_shape] = Placement(
            name,
            1 + (before.count if before else 0),
            leaf.cut_shape,
            tuple(axis or "-" for axis in leaf.axes),
            ", ".join(cuts) or "whole copy",
            num_bytes + (before.device_bytes if before else 0),
        )
    return sorted(found.values(), key=lambda row: -row.device_bytes)
