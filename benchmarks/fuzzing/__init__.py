"""What `fuzz.py` tries: dataset files, configs, completions. A target has ``draw(random)`` and ``check(example)``."""
