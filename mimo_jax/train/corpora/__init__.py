"""Generators and readers of the demo's training text, one module per scene."""
