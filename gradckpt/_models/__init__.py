"""The work of enable() on a model: which modules are checkpointed, how, and whether compression
took place.
"""
