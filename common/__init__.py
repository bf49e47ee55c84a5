"""Device-free parts: what a call means, what is visible, how it is split, what a split leaves
behind.
"""
