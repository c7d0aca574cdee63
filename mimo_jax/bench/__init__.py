"""Measurements; never imported by product code. `python -m mimo_jax.bench decode`."""
