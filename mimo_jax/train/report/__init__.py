"""Curves and a page of a training run, from the files that it leaves: no model, no device.

Works while the run goes on, and on what a crashed one has left.
"""
