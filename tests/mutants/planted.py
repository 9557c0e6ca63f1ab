"""Bugs that no operator makes, and wrong edits that change no result."""

# Each a fragment that the package has once, what stands there instead, and the
# tests that are run first. If they are gone others notice, which takes longer.
PLANTED = """
# Clip.
bound / jnp.maximum(norm, bound) => 1 + 0 * norm @ core/per_example_test.py weights
x * (factor / divisor) => x / divisor @ integration/clip_routes_test.py two_matrices
jnp.where(counts, x * (factor / divisor), 0) => x * (factor / divisor) @ core/clip_range_test.py longer
squared_norm(leaves, norm) => sum(jnp.vdot(x, x) for x in leaves[:2]) @ core/clip_range_test.py longer
jnp.isfinite(squared_norm) => squared_norm == squared_norm @ core/clip_range_test.py longer
jnp.all(jnp.stack(finite)) => finite[0] @ laws/laws_test.py not_finite
jnp.where(is_padding, 0, x) => x @ core/per_example_test.py sum
b * norm if follows else b => b * norm if follows else 1.0 @ integration/clip_routes_test.py two_matrices
math.hypot(*self.shares.values()) => max(self.shares.values()) @ training/clipping_test.py share_the_clip_norm
shortened(leaves, self.stability) => shortened(leaves, -self.stability) @ core/clip_range_test.py formula
stddev = rule.fraction_stddev => stddev = 0.0 @ training/clipping_test.py quantile
QuantileState(norm, next_key) => QuantileState(norm, state.prng_key) @ audit/make_private_test.py new_key
as_made=as_made => as_made=True @ training/mechanism_test.py before_the_clip
gradients_noise_multiplier(clipping, sigma, expected_batch_size) => sigma @ training/mechanism_test.py accounted
jnp.where(below, 0.5, -0.5) => jnp.where(below, 1.0, 0.0) @ training/clipping_test.py quantile
fits and x.shape[0] == size => fits and x.shape[0] % size == 0 @ lora/batched_backward_test.py time_major
# Noise and keys.
_lattice.add_noise(key, updates, stddevs) => _lattice.add_noise(key, updates, stddevs * stddevs) @ transforms/privatizer_test.py noise
updates.on_lattice(stddevs) => updates.on_lattice(0.5 * stddevs) @ audit/exact_release_test.py size
updates.on_lattice(stddevs) => updates.to_floats() @ audit/exact_release_test.py any_order
noisy._replace(pairs=pairs) => noisy._replace(pairs=pairs, others=stacks.others) @ transforms/privatizer_test.py other_leaves
jnp.array(numbers, jnp.uint32), stacked => jnp.zeros(len(numbers), jnp.uint32), stacked @ core/lattice_test.py independent
jnp.uint32(stride) * iota => jnp.uint32(stride // 7) * iota @ core/generators_test.py
return keys[0], keys[1] => return prng_key, keys[1] @ core/randomness_test.py forgets
os.urandom(4 * math.prod(shape)) => bytes(4 * math.prod(shape)) @ core/randomness_test.py asks
jnp.trunc(x / unit) => jnp.round(x / unit) @ core/lattice_test.py truncation
((c >> twelve) & inside) => (c & inside) @ core/lattice_test.py words
noise_multiplier * clip.bound / clip => noise_multiplier * clip.bound / 2 / clip @ training/mechanism_test.py accounted
_exact_sum.unit_of(sigma, 1.0, => _exact_sum.unit_of(sigma / 2, 1.0, @ contrib/input_metric_test.py noise_of_its_length
release ^ _fingerprint.of_arrays(params) => release + 0 @ training/noise_once_test.py unrelated
(*fingerprint, rows)), => fingerprint), @ training/noise_once_test.py gives_other_noise
_of_value(params, known), => '', @ core/fingerprint_test.py known_by
# Order.
set(before) - {'clip', 'noise'}: => set(before) - {'clip', 'noise', 'direction'}: @ transforms/chain_order_test.py void
with_axis(axis, rows, start) => with_axis(axis, rows, part.start) @ proofs/independence_test.py refused_by
# Batches and records.
resolve_key('prng_key', None, (), words=4) => resolve_key('prng_key', 0, (), words=4) @ training/private_test.py nothing_in_common
spawn_key=(step,) => spawn_key=(0,) @ core/sampling_test.py seed_and_step
spawn_key=(step, place) => spawn_key=(step, count) @ core/sampling_test.py by_chance
self.dataset_size, size, replace=False => size, size, replace=False @ core/sampling_test.py cut_by_chance
only_present(x, 0) => x @ training/records_test.py missing_records
only_present(x, x[first]) => x @ training/records_test.py missing_records
return examples, ~fits, None => return examples, places < 0, None @ training/records_test.py
x[~fits] = 0 => pass @ training/records_test.py record_by_record
[y.astype(x.dtype) for x, y in pairs] => [x for x, y in pairs] @ training/private_test.py move_on
0o600) => 0o644) @ training/state_file_test.py owner
# Accounting.
delta / len(self._FACTORS) => delta @ accounting/budget_test.py share_delta
settings.delta / len(settings.stops) => settings.delta @ training/stops_test.py any_stop
[training, *settings.prior_releases.events] => [training] @ contrib/input_metric_test.py accounted_for
[training, *prior_events] => [training] @ properties/accounting_test.py calibration_beside
tuple(x.event for x in releases) => tuple(x.event for x in releases)[:1] @ training/prior_releases_test.py accounts_for
np.where(rows == columns, 1, math.sqrt(2)) => np.where(rows == columns, 1, 2) @ core/one_shot_test.py length
attempt = self._owner.written_down(state, found, rows) => attempt = 0 @ training/journal_test.py elsewhere
"""  # noqa: E501

# Edits of `edits.py`, by name and what they change # why nothing notices them.
_EQUIVALENT = """
accounting/_calibration.py calibrate_noise_multiplier constant 3: 100 -> 101 # another start
accounting/_calibration.py calibrate_noise_multiplier constant 4: 5000 -> 5001 # another start
accounting/_calibration.py calibrate_noise_multiplier constant 5: 30 -> 31 # another start
accounting/_calibration.py calibrate_noise_multiplier constant 6: 2 -> 3 # another start
accounting/_calibration.py calibrate_noise_multiplier name 1: min -> max # another start
accounting/_calibration.py calibrate_noise_multiplier constant 8: 1.0 -> 2.0 # another start
accounting/_calibration.py calibrate_noise_multiplier constant 9: 0.02 -> 0.04 # another start
accounting/_calibration.py calibrate_noise_multiplier constant 10: 2 -> 3 # another start
accounting/_calibration.py calibrate_noise_multiplier constant 11: 0.01 -> 0.02 # another start
_exact_sum.py towards_zero constant 2: 100 -> 101 # larger than any sum
accounting/_calibration.py _solve comparison 1: height(high) > 0 -> height(high) >= 0 # floats that are never equal
accounting/_calibration.py _solve operator 12: middle + margin -> middle - margin # how many steps it takes
accounting/_calibration.py approximate_noise_multiplier operator 1: mu / (sampling_probability * math.sqrt(steps)) -> mu * (sampling_probability * math.sqrt(steps)) # another start
accounting/_epsilon.py delta_left comparison 1: added > delta / 2 -> added >= delta / 2 # floats that are never equal
accounting/_events.py module constant 3: 4 -> 5 # any orders will do
accounting/_events.py affordable_interval name 1: min -> max # a finer grid, which takes more memory
contrib/_input_metric.py _of_mean constant 1: 1e-300 -> 2e-300 # of a float32, only zero is so short
contrib/heads.py _classes operator 3: num_classes - 1 -> num_classes + 1 # a label that is no class has a vector of zeros
contrib/heads.py module constant 5: 1212498244 -> 1212498245 # a number of its own is as good as another
training/_private.py PrivateTraining.compile call 3: _fingerprint.of_arrays(arguments[3:]) -> arguments[3:] # the first step compiles it instead
training/_private.py PrivateTraining.compile sign 1: -1 -> 1 # there are no records, so every place is empty
training/_records.py converted comparison 11: rows.dtype.itemsize < 8 -> rows.dtype.itemsize <= 8 # float64 to float64
_identity.py _on_grid call 16: bool(abs(mean) >= 0.5 and max(long, close) >= _EVIDENCE) -> abs(mean) >= 0.5 and max(long, close) >= _EVIDENCE # a bool of NumPy
_identity.py unmarked operator 1: np.float64(values) * np.exp2(steps / _POINTS) -> np.float64(values) / np.exp2(steps / _POINTS) # steps as likely as their negatives
_lattice.py integers keyword 1: jnp.asarray(x).at[a >> jnp.uint32(20)].get(mode='promise_in_bounds') -> jnp.asarray(x).at[a >> jnp.uint32(20)].get() # all are in bounds
_linalg/_factorizations.py pairs_by_iteration constant 1: 1 -> 0 # a square
_linalg/_frames.py orthonormal_frame operator 1: reciprocals[:, :, None] * products * reciprocals[:, None, :] - eye * alive[:, None, :] -> reciprocals[:, :, None] * products * reciprocals[:, None, :] + eye * alive[:, None, :] # the slower of two ways
_linalg/_products.py flat_batch call 1: jax.jit(mapped) -> mapped # time
_modules/_tree.py ModuleTree.tree call 2: float(x.scale ** power) -> x.scale ** power # a float
_proofs/_rules.py _per_key constant 1: 0 -> 1 # the type of a key
_proofs/_rules.py _per_key name 1: all -> any # the keys of an equation are of one type
_proofs/_walk.py Walk._while.once arguments 3: join(x, moved(goes_on)) -> join(moved(goes_on), x) # where a message points
accounting/_calibration.py _solve comparison 8: last < 0 -> last <= 0 # how many steps it takes
accounting/_calibration.py _solve constant 12: 1 -> 0 # how many steps it takes
accounting/_calibration.py _solve constant 13: 0 -> 1 # how many steps it takes
accounting/_calibration.py calibrate_noise_multiplier operator 3: target_epsilon / 30 -> target_epsilon * 30 # another start
accounting/_filters.py Filter.costs call 3: all((cost >= 0 for cost in costs)) -> (cost >= 0 for cost in costs) # negative numbers were refused before
contrib/_one_shot_release.py to_vector sign 1: -1 -> 1 # a square
fixed_rank/_tangents.py TallSum.squares arguments 5: gram(self.shift, of_shift) -> gram(of_shift, self.shift) # a symmetric matrix
fixed_rank/_tangents.py has_diagonal_inverses.rounding comparison 1: sizes - eye * diagonal <= limit -> sizes - eye * diagonal < limit # the slower of two ways
lora/_adding.py _adapter keyword 4: _nnx().LoRA(n, rank, m, dtype=layer.dtype or layer.kernel.dtype, rngs=rngs, a_initializer=columns, b_initializer=zeros) -> _nnx().LoRA(n, rank, m, dtype=layer.dtype or layer.kernel.dtype, rngs=rngs, a_initializer=columns) # the default
muon/_newton_schulz.py _polynomial arguments 1: product(poly, rest) -> product(rest, poly) # polynomials of one matrix
training/_private.py PrivateTraining.step call 2: int(state.step) -> state.step # a number that NumPy has
transforms/_chain.py _remember comparison 3: id(x) == key -> id(x) != key # the leaves of a pair die together
_randomness/_keys.py for_release constant 3: 8 -> 9 # the last word once more
transforms/_step_size.py adapt_step_size.update constant 3: 2 -> 3 # the ramp ends at two
_proofs/_indexing.py _pad constant 4: 0 -> 1 # the size of the axis is compared afterwards
_proofs/_indexing.py _pad arguments 3: common(found, value) -> common(value, found) # which is symmetric
_proofs/_indexing.py module constant 2: 2 -> 3 # indices of one record are refused as mixing
_randomness/_generators.py threefry4x32.mixed arguments 2: jax.lax.bitwise_xor(x, _rotated(y, distance)) -> jax.lax.bitwise_xor(_rotated(y, distance), x) # which is symmetric
accounting/_calibration.py _refined constant 4: 1.0 -> 2.0 # the logarithm of their quotient
accounting/_calibration.py _refined constant 11: 0.99 -> 1.98 # how many steps it takes
accounting/_calibration.py _solve constant 7: 2 -> 3 # how many steps it takes
accounting/_events.py module constant 18: 512 -> 513 # any orders will do
_linalg/_factorizations.py pairs_by_iteration call 3: float(np.finfo(core.dtype).eps) -> np.finfo(core.dtype).eps # a number of NumPy
training/_seen.py look.update keyword 1: transformation.update(grads, state, params, is_padding_example=is_padding) -> transformation.update(grads, state, params) # the step that runs is proved with it
training/_records.py Records.collect call 2: int(place) -> place # a number that NumPy has
transforms/_step_size.py _inner arguments 1: gram(a, b) -> gram(b, a) # a trace
inference/_mechanism.py clip constant 10: 10 -> 11 # so short a vector is not clipped
_modules/_tree.py ModuleTree._stacked.stacked constant 1: 1 -> 0 # a product with one
_proofs/_kinds.py result name 1: max -> min # of one
_proofs/_walk.py Walk._because arguments 1: join(self._context, moved(of)) -> join(moved(of), self._context) # where a message points
_clip_rules.py GroupClipping._factors arguments 2: Factors(leaves, factors, jnp.all(counts)) -> Factors(factors, leaves, jnp.all(counts)) # a product
_identity.py marked constant 4: 0 -> 1 # times the sign of zero
accounting/_events.py module constant 1: 2 -> 3 # any orders will do
inference/_host.py _discrete_gaussian constant 4: 8 -> 9 # how many are tried at a time
training/_fingerprint.py differing arguments 1: np.array_equal(x, y) -> np.array_equal(y, x) # which is symmetric
training/_records.py _declared constant 1: 8 -> 9 # no number has so many bytes
training/_records.py _declared constant 2: 16 -> 17 # no number has so many bytes
"""  # noqa: E501
EQUIVALENT = {x.split(' # ')[0] for x in _EQUIVALENT.strip().splitlines()}
