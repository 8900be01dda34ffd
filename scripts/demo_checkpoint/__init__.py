"""How the demo checkpoint is made: text, data, optimiser, training, evaluation."""
