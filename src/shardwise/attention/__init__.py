"""Attention in blocks: parts over some of the keys that merge exactly, and how keys travel where sequences are cut."""
