"""What `longgen run` does: prompts in, one request after another, results out."""
