"""What quantisation costs: every method, form and target of ours, and what other quantisers make of the same model."""
