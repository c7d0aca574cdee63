"""Whether a program fits a device, by how much, and how long a context would."""

import dataclasses

# The rest is for what no plan sees: the CUDA context, graphs, communication buffers, fragments.
USABLE = 0.9


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Peak against capacity, per device; sizes in bytes.

    Attributes:
      peak_bytes: The most that the program holds at once.
      capacity_bytes: Memory of the device.
      max_context: Longest context that would fit, at most the model's; 0 if none does.
    """

    peak_bytes: float
    capacity_bytes: float
    max_context: int

    @property
    def budget_bytes(self) -> float:
        return USABLE * self.capacity_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes < self.budget_bytes

    def __str__(self) -> str:
        spare = (self.budget_bytes - self.peak_bytes) / 1e9
        words, longest = f"does not fit, {-spare:.1f} GB over", "no context would fit"
        if self.fits:
            words = f"fits, {spare:.1f} GB to spare"
        if self.max_context:
            longest = f"largest context {self.max_context:,}"
        return (
            f"{words}: peak {self.peak_bytes / 1e9:.2f} GB of {self.budget_bytes / 1e9:.1f} GB "
            f"({USABLE:.0%} of {self.capacity_bytes / 1e9:.0f}); {longest}"
        )


def judge(
    peak_bytes: float,
    capacity_bytes: float,
    *,
    context: int,
    max_position: int,
    cache_bytes_per_token: float,
    temp_bytes: float,
) -> Verdict:
    """The verdict on a program compiled at one context.

    Args:
      peak_bytes: At that context.
      capacity_bytes: Of the device.
      context: That context, in tokens.
      max_position: The model's longest.
      cache_bytes_per_token: Growth of the caches on one device.
      temp_bytes: Scratch memory at that context. Longer contexts are charged all of it in
        proportion, shorter ones keep it whole: the answer is a context that fits, not the last.

    Example: peak 80 GB of 141 at 1,000 tokens, 10 MB of cache per token, no scratch -> fits, and
      5,690 tokens would.
    """
    spare = USABLE * capacity_bytes - peak_bytes
    slope = cache_bytes_per_token + (temp_bytes / context if spare > 0 else 0.0)
    longest = max_position if slope <= 0 else int(context + spare / slope)
    return Verdict(peak_bytes, capacity_bytes, max(0, min(longest, max_position)))
