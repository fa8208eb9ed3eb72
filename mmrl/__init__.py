"""Reinforcement learning for multimodal and embodied policies: one trainer, specialised by modality adapters.

Importing this package is cheap: torch, transformers, mujoco and lerobot are loaded by the module that needs them.
"""

__version__ = "0.1.0"
__project__ = "mmrl-trainer"
"""Name of the distribution; the command line checks it, since another project owns the name ``mmrl`` on the index."""
