"""Vision-language policies: tasks with images and video, and the adapter that trains them."""

__project__ = "mmrl-trainer"
