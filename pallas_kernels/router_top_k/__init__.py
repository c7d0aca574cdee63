"""Choosing experts for a few tokens, and the list of distinct ones; see api.py."""
