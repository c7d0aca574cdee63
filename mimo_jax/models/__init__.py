"""The models: Flax nnx modules that declare every weight once and call `layers/` for the maths."""
