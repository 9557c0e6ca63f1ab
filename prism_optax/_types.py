"""Names of types that stand in many signatures."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import numpy as np
import optax

# A number, also one that JAX traces: a schedule, an injected hyper-parameter.
Scalar: TypeAlias = float | jax.Array
# A number, or a function of the number of updates so far. (optax's own name for
# it is unknown to type checkers.)
ScalarOrSchedule: TypeAlias = Scalar | Callable[..., jax.typing.ArrayLike]
# A tree of arrays, not of parameters alone, and a leaf of one: type checkers
# know nothing of them.
ArrayTree: TypeAlias = optax.Params
# An array of JAX or of NumPy.
Array: TypeAlias = jax.Array | np.ndarray
# A seed or a typed key (``jax.random.key``); None for a fresh one of the
# operating system's. Noise takes 'chacha20' as well: fresh, for this generator.
PRNGKeyLike: TypeAlias = int | jax.Array | str | None
# How many updates noise is for: a number, 'unlimited', or None: unlimited.
StepsLike: TypeAlias = int | str | None
DTypeLike: TypeAlias = jax.typing.DTypeLike
