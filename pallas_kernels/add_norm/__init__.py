"""Residual addition and RMS norm in one launch; see api.py."""
