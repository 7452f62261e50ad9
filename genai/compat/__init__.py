"""Other libraries' names over this one: shims that nothing below imports."""
