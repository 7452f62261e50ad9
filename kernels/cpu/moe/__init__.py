"""Mixtures of experts as native operators: each token is processed by the few experts that its router selects.

`mixture` makes the calls. `routing` selects experts, sorts the tokens by expert, and adds up a token's results.
`products` multiplies the tokens by an expert's weights.
"""
