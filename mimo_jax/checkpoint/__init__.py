"""Bytes to parameters and back: published checkpoints in, training state out and in.

Holds file formats and name maps only: no `jit`, no forward pass, nothing of decoding. The training
state goes through `store`, published checkpoints through the readers beside it.
"""
