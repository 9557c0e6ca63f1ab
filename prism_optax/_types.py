"""Names of types that stand in many signatures."""

from typing import TypeAlias

import jax
import optax

# A number, also one that JAX traces: a schedule, an injected hyper-parameter.
Scalar: TypeAlias = float | jax.Array
# Any tree of arrays, not parameters alone.
ArrayTree: TypeAlias = optax.Params
# A seed or a typed key (``jax.random.key``); None for the operating system's.
PRNGKeyLike: TypeAlias = int | jax.Array | None
DTypeLike: TypeAlias = jax.typing.DTypeLike
