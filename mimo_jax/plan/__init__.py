"""What a model costs on a device nobody here has: bytes, launches, time; compiled, not guessed."""
