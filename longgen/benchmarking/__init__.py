"""`longgen bench`: what the engine does beside what the machine allows."""
