"""The tasks of RULER (Hsieh et al. 2024, arXiv:2404.06654) that need no download, in its format and templates."""
