"""Attention in blocks: parts over some of the keys that merge exactly, and how keys come by where sequences are cut."""
