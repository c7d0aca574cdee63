"""One look at one GPU, in eight minutes: are the kernels right, how fast is a device's share."""
