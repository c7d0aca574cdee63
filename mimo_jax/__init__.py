"""Speculative decoding of MiMo-style mixture-of-experts models in JAX.

A large *target* model decides what text comes out; a small *drafter* proposes a block of tokens
that the target checks in one pass. This package holds both models, the loop that drafts, verifies
and commits inside one compiled program, and the trainer that makes a drafter. Terms are defined in
GLOSSARY.md, the modules and their import order in ARCHITECTURE.md.

Only public names belong in this file. Importing it must not start JAX or touch a device: `--help`
and the planner answer on machines where that is slow or impossible.
"""

__version__ = "0.1.0.dev0"
