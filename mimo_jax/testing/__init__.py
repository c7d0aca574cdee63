"""Helpers of tests and notebooks: scripted drafters, tiny models, plots. Product code stays out."""
