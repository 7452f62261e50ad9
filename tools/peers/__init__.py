"""How fast other engines run the models that we run, on the same machine, in the same minutes.

Makes random checkpoints of real shapes, turns each into every engine's own form (`engines/`), runs one process per
measurement in turns (`measure`, `workers/`), keeps what was measured in a JSON file (`results`) and writes
docs/performance.md from it (`report`). Every peer lives in its own virtual environment, because their requirements
contradict each other. Knows nothing of how an engine computes.
"""
