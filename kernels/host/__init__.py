"""The host: functions of NumPy arrays, and facts of its processor, whatever device runs the rows of tokens."""
