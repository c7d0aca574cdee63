"""Training of the target and of its drafter.

May import models, quant, checkpoint and decode (to measure accept length); never serving.
The pure pieces (`muon`, `losses`, `block_mask`, `data`) know nothing of the model classes: they
take arrays and return arrays, so each can be tested against a slow oracle.
"""
