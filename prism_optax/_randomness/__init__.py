"""Keys, and the generators of random words under them."""
