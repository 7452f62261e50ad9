"""The command line: one module per command. Everything that the commands do is also available in Python.

stdout carries only the result (model text, tables, JSON); everything else goes to stderr. Exit codes: 0 success,
1 failure, 2 usage error, 130 interrupted.
"""
