"""Products of few rows with a dense weight, FP8 or bfloat16, with or without an RMS norm before."""
