"""What every package may use and that uses none of them: files, locks, interrupts, memory and cores of the host."""
