"""A package, so that no other that is named `tests` hides `tests.drawing`."""
