"""Which parameters are quantized, by name; models have no branches for it.

As the published FP4 checkpoints do: the experts' matrices are MXFP4, everything else keeps its
format. In a MiMo-V2 they are 98 % of the weights; router, attention and norms are what small errors
hurt most.
"""

# Stacks [d, e, f], [d, e, f] and [e, f, d]: groups lie along the axis that a product sums over.
_REDUCTION_AXIS = {"experts_gate": 0, "experts_up": 0, "experts_down": 1}


def mxfp4_axis(name: str) -> int | None:
    """The axis of a float parameter along which its MXFP4 groups lie; None = stays as it is.

    Args:
      name: As in `models.params.flatten`.

    Example: "layers.3.experts_down" -> 1; "layers.3.w_router" -> None.
    """
    return _REDUCTION_AXIS.get(name.split(".")[-1])
