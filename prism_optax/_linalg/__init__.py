"""Small dense linear algebra: products, factorizations, frames."""
