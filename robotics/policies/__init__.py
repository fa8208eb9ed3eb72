"""Robot policies."""
