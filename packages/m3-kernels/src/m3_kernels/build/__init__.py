"""From kernel sources to a loaded library: find the sources, key them by content, compile once, refuse what does not fit its key."""
