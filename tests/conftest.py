"""What every test shares: no network, one torch thread, and property tests that draw the same examples each time."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers or datasets
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# A busy machine is no reason to fail.
settings.register_profile("mmrl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mmrl")
