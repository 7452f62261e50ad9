"""A speed comparison with other engines, on the same models, on the same machine and at the same time.

The package makes random checkpoints of real shapes, converts each for every engine (`engines/`), runs one process per
measurement in turns (`measure`, `workers/`), stores the measurements in a JSON file (`results`) and writes
docs/reference/performance.md from that file (`report`). Each peer has its own virtual environment, because the peers'
requirements conflict. Only `engines/` and `workers/` depend on the engines.
"""
