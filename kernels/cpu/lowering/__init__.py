"""From records to calls: where values lie, which operators compute a record, where threads wait for each other.

`memory` places values, `weights` packs constants, and `records` joins records and says which calls each becomes.
"""
