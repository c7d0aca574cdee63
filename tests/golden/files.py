"""Where the golden data lies; see README.md beside it."""

from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parent / "data"

# Other implementations agree with the data to about 4e-6; the rest is for the order of summation.
ATOL = 2e-5


def arrays(name: str) -> dict[str, np.ndarray]:
    """All arrays of one .npz, ids as int32."""
    with np.load(DATA / f"{name}.npz") as file:
        loaded = {key: file[key] for key in file.files}
    is_id = lambda array: array.dtype == np.int64
    return {k: v.astype(np.int32) if is_id(v) else v for k, v in loaded.items()}
