"""Accelerator kernels, each beside the plain JAX code it must agree with.

A leaf package: it imports JAX and NumPy and nothing of `mimo_jax`, takes plain arrays and scalars,
and knows no configs, caches or routers. That keeps a kernel usable, testable and measurable alone.

    dispatch        picks an implementation by name or by what the platform supports, and keeps
                    the reason for each one it turned down
    formats         the number formats (e2m1, e8m0, e4m3) and their bit layout; the only place
                    that says which nibble of a byte comes first
    sink_attention  attention with sinks, windows and draft-block or tree masks
    fp8_matmul      products of few rows with a dense weight, FP8 or bfloat16, an RMS norm in front
    grouped_matmul  expert matrix products with bfloat16 or MXFP4 weights; never its own router
    mxfp4_codec     pack and unpack on the device, rounding to nearest even

Every op folder has the same parts: `api.py` (shapes and errors, picks the implementation),
`reference.py` (plain `jax.numpy` in float32, slow and obvious; also the XLA implementation),
`pallas_<backend>.py` (the kernel) and `arg_specs.py` (named shapes shared by tests and bench).
"""
