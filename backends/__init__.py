"""Backends: one file each, in priority order in ``registry``; ``decode`` is the way of one call."""
