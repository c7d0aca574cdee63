"""Array annotations and the dimension key: one letter, one meaning, everywhere.

Annotate public functions as `q: Float[Array, "b t n h"]`, and use the same letters in einsum
strings and comments. Under the test suite every annotated shape is checked at run time, so an axis
in the wrong place fails where it happens and not three functions later.

    b   batch rows                      e   experts
    t   query tokens                    f   expert hidden width
    s   key/value tokens                v   vocabulary
    d   model width                     l   layers
    n   query heads                     m   draft tokens
    k   key/value heads                 m1  draft-block positions, m + 1
    g   query heads per KV head, n / k  c   context-feature width
    h   head dimension                  q   quantization groups

An axis that none of these names gets a whole word ("b window"), a fixed length its number
("b 2"). Within one function a letter stands for one length.

Traps: `Float` covers every floating dtype, bfloat16 and the 8-bit ones included; name the width
(`Float32`) where it matters. `Array` is `jax.Array`: a NumPy array is not one, so a function that
takes both says `ArrayLike`.

This module only gives names. It holds no maths, no constants and no shapes of a model.
"""

from jaxtyping import Array as Array
from jaxtyping import ArrayLike as ArrayLike
from jaxtyping import BFloat16 as BFloat16
from jaxtyping import Bool as Bool
from jaxtyping import Float as Float
from jaxtyping import Float32 as Float32
from jaxtyping import Int as Int
from jaxtyping import Int32 as Int32
from jaxtyping import Key as Key
from jaxtyping import Num as Num
from jaxtyping import PyTree as PyTree
from jaxtyping import Shaped as Shaped
from jaxtyping import UInt8 as UInt8
