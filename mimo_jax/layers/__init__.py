"""Pure functions of arrays: the one home of the mathematics. Scalars are keyword arguments."""
