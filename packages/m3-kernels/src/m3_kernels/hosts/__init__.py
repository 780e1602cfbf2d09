"""How each target starts a launch."""
