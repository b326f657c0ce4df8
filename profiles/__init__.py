"""How long things take: cost formulas, their fitted coefficients, and where these come from."""
