"""Mixtures of experts as native operators: each token goes through the few experts that its router chose.

`mixture` writes the calls: `routing` chooses experts, puts the tokens of each side by side, and adds a token's results
up; `products` multiplies them with an expert's weights.
"""
