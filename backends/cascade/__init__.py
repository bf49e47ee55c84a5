"""Prefixes that requests share, read once: found, weighed, planned, called and merged."""
