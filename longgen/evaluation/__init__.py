"""Questions with known answers, for judging what a model finds in long text."""
