"""Backends: how ranks exchange what they hold. They know nothing of ops and moves."""
