"""Generation after very long prompts on one GPU, with the KV cache in host memory."""

__version__ = "0.1.0"
