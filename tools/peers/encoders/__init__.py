"""Workers of `tools/compare_encoders.py`: each loads one engine, and times the texts that it reads from stdin.

They run in the environments of the engines, so that they import nothing from this project, except for `ours`.
"""
