"""Backends: how ranks exchange what they hold. Knows nothing of ops or layouts beyond what a step packs."""
