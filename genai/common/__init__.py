"""Utilities that every package may use and that depend on no package: files, locks, interrupts, memory and cores."""
