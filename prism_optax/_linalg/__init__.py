"""Small dense linear algebra: products, factorizations, frames."""

from prism_optax._linalg._products import (
  Tall,
  at_least_float32,
  branch,
  column_norms,
  columns_times,
  eigh,
  flat_batch,
  gram,
  gram_tpu,
  inverse_cholesky,
  inverse_sqrt,
  matmul,
  orthogonal_polar,
  polar,
  qr,
  safe_reciprocal,
)

# fmt: off
__all__ = [
  'Tall', 'at_least_float32', 'branch', 'column_norms', 'columns_times', 'eigh',
  'flat_batch', 'gram', 'gram_tpu', 'inverse_cholesky', 'inverse_sqrt',
  'matmul', 'orthogonal_polar', 'polar', 'qr', 'safe_reciprocal',
]
# fmt: on
