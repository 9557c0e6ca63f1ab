"""Bugs that no operator makes, and wrong edits that change no result."""

# Each a fragment that the package has once, and what stands there instead.
PLANTED = """
# Clip.
bound / jnp.maximum(norm, bound) => 1 + 0 * norm
x * (factor / divisor) => x / divisor
jnp.where(counts, x * (factor / divisor), 0) => x * (factor / divisor)
squared_norm(leaves, norm) => sum(jnp.vdot(x, x) for x in leaves[:2])
jnp.isfinite(squared_norm) => squared_norm == squared_norm
jnp.all(jnp.stack(finite)) => finite[0]
jnp.where(is_padding, 0, x) => x
b * norm if follows else b => b * norm if follows else 1.0
math.hypot(*self.shares.values()) => max(self.shares.values())
shortened(leaves, self.stability) => shortened(leaves, -self.stability)
stddev = rule.fraction_stddev => stddev = 0.0
QuantileState(norm, next_key) => QuantileState(norm, state.prng_key)
gradients_noise_multiplier(clipping, sigma, expected_batch_size) => sigma
jnp.where(below, 0.5, -0.5) => jnp.where(below, 1.0, 0.0)
fits and x.shape[0] == size => fits and x.shape[0] % size == 0
# Noise and keys.
_lattice.add_noise(key, updates, stddevs) => _lattice.add_noise(key, updates, stddevs * stddevs)
updates.on_lattice(stddevs) => updates.on_lattice(0.5 * stddevs)
updates.on_lattice(stddevs) => updates.to_floats()
noisy._replace(pairs=pairs) => noisy._replace(pairs=pairs, others=stacks.others)
jnp.uint32(i) => jnp.uint32(0)
jnp.uint32(stride) * iota => jnp.uint32(stride // 7) * iota
return keys[0], keys[1] => return prng_key, keys[1]
os.urandom(4 * math.prod(shape)) => bytes(4 * math.prod(shape))
jnp.trunc(x / unit) => jnp.round(x / unit)
((c >> twelve) & inside) => (c & inside)
noise_multiplier * clip.bound / clip => noise_multiplier * clip.bound / 2 / clip
_lattice.unit_of(sigma, 1.0, => _lattice.unit_of(sigma / 2, 1.0,
release ^ _fingerprint.of_arrays(params) => release + 0
_of_value(params, known), => '',
# Order.
set(before) - {'clip', 'noise'}: => set(before) - {'clip', 'noise', 'direction'}:
with_axis(axis, rows, start) => with_axis(axis, rows, part.start)
# Batches and records.
resolve_key('prng_key', None, (), words=4) => resolve_key('prng_key', 0, (), words=4)
spawn_key=(step,) => spawn_key=(0,)
spawn_key=(step, place) => spawn_key=(step, count)
self.dataset_size, size, replace=False => size, size, replace=False
only_present(x, 0) => x
only_present(x, x[first]) => x
return examples, ~fits, None => return examples, places < 0, None
x[~fits] = 0 => pass
return kept, lost => return new, lost
0o600) => 0o644)
# Accounting.
delta / len(self._FACTORS) => delta
settings.delta / len(settings.stops) => settings.delta
[training, *settings.prior_releases.events] => [training]
[training, *prior_events] => [training]
tuple(x.event for x in releases) => tuple(x.event for x in releases)[:1]
np.where(rows == columns, 1, math.sqrt(2)) => np.where(rows == columns, 1, 2)
attempt = self._owner.written_down(state, found) => attempt = 0
"""  # noqa: E501

# Edits of `edits.py`, by name and what they change: why nothing notices them.
_GUESS = 'where a search begins, or how finely; it ends at the same multiplier'
_EARLY = 'a call that has to fail for bad arguments, at any noise and interval'
EQUIVALENT: dict[str, str] = {
  f'accounting/_calibration.py calibrate_noise_multiplier {edit}': why
  for edit, why in {
    'constant 3: 100 -> 101': _GUESS,
    'constant 4: 5000 -> 5001': _GUESS,
    'statement 4: spent(100.0, _SEARCH_INTERVAL) -> pass': _EARLY,
    'constant 5: 100.0 -> 200.0': _EARLY,
    'constant 6: 1.0 -> 2.0': _GUESS,
    'constant 7: 0.02 -> 0.04': _GUESS,
    'constant 8: 2 -> 3': _GUESS,
    'constant 9: 1e-06 -> 2e-06': _GUESS,
  }.items()
}
