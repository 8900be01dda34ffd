"""The sections of gpu_check.py, a module each: every `run` takes Settings and returns a Result."""
