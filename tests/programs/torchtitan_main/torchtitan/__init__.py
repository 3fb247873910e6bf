"""What gradckpt uses of torchtitan's main branch, which is on no index: a stand-in with its names,
signatures, defaults and order of calls (RegionAC with get_saved_tensors_hooks; autumn of 2026).
"""
