"""The decode loop: draft, verify, accept, commit inside one compiled program. No text, no files."""
