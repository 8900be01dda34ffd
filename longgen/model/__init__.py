"""Qwen text models over a Pass. The only part of the project that knows transformers."""
