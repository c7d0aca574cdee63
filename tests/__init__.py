"""Tests of mimo_jax and pallas_kernels; a package so that they can share `tests.oracles`."""
