"""Questions that many simulations answer together: how true predictions are, and what would be better."""
