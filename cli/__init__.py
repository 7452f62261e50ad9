"""The command line: one file per command, and no logic that a user of the library would miss.

stdout carries only what was asked for (model text, tables, JSON); everything else goes to stderr. Exit codes: 0 ok,
1 failure, 2 usage, 130 interrupted.
"""
