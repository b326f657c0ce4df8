"""What the algorithms compute: advantages (numbers only) and losses (torch)."""
