"""Attention over pieces of a KV cache: partial results with their log-sum-exp, and the merge of partial results."""
