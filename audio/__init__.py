"""Audio-language policies."""

__project__ = "mmrl-trainer"
