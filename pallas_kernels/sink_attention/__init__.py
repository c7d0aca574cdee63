"""Attention of one block of tokens against its memory and itself, from projection to output."""
