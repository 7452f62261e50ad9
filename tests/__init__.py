"""A package, so that another package with the name `tests` cannot hide `tests.drawing`."""
