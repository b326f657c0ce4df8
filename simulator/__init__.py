"""A scenario, played in virtual time."""
