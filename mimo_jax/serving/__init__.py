"""Decoding for others: files of prompts in, files of answers out. No model code."""
