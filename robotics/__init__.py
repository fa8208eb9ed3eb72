"""Language-conditioned robot policies in MuJoCo: environments, policies, and the adapter that trains them."""

__project__ = "mmrl-trainer"
