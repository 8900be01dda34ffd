"""Which blocks of the past a layer reads. Policies choose blocks; they never move them."""
