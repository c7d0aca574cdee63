"""Accelerator kernels, each beside the plain JAX code it must agree with.

A leaf package: it imports JAX and NumPy and nothing of `mimo_jax`, takes plain arrays and scalars,
and knows no configs, caches or routers. That keeps a kernel usable, testable and measurable alone.

    dispatch        the words for implementations, and why a device cannot run the kernels
    formats         the number formats (e2m1, e8m0, e4m3) and their bit layout; the only place
                    that says which nibble of a byte comes first
    sink_attention  a block's attention from the raw projection to the output, memory written in
                    place: one launch, two over a long linear memory
    grouped_matmul  SwiGLU of the chosen MXFP4 experts in two launches; never its own router
    router_top_k    the router's choice and the list of distinct experts
    fp8_matmul      dense products with FP8 or bfloat16 weights, an RMS norm in front
    add_norm        residual sum and RMS norm

Every op folder has the same parts: `api.py` (shapes and errors, runs the implementation that it is
told), `reference.py` (plain `jax.numpy`, slow and obvious; also the XLA implementation) and
`pallas_mosaic_gpu.py` (the kernel); `arg_specs.py`, where there is one, has named shapes shared by
tests and bench. Kernels are Mosaic GPU for Hopper: compiled ahead of time for an H200 in the tests,
and run in Pallas' GPU interpreter on the CPU.
"""
