"""What a machine has and does, and what a request on it will take."""
