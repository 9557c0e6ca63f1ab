"""Lines that, wrong, would be silent: where they are, and who must notice.

Every mutant is a replacement of text that must occur exactly once, so that a
changed line has its mutant looked at again. ``check.py`` runs them.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One replacement, and where a test should notice.

  Attributes:
    name: What is broken.
    path: File below the package.
    old: Text that occurs in it once.
    new: What stands there instead.
    tests: Files below tests, each with an optional `-k` expression after a
      blank, in the order in which they run.
  """

  name: str
  path: str
  old: str
  new: str
  tests: tuple[str, ...]


TRAJECTORY = 'aliases/prism_test.py traced and (default or debiased)'
DEFICIENT = 'aliases/prism_test.py deficient'
GAUGE = 'transforms/rank_preconditioner_test.py change_before_every_step and 10'
GEOMETRY = 'fixed_rank'
NOISE = 'transforms/privatizer_test.py'
CLIP = 'transforms/intrinsic_clip_test.py'
TANGENTS = 'fixed_rank/_tangents.py'
RETRACTION = 'fixed_rank/_retraction.py'
PRECONDITIONER = 'transforms/_moments.py'
MEASURED = 'audit/make_private_test.py has_its_size'
ADVERSARIAL = 'audit/make_private_test.py whatever and dense-quantile'
INTRINSIC_CLIP = 'transforms/_intrinsic_clip.py'
PRIVATIZER = 'transforms/_privatizer.py'
CHAIN, STEP = 'transforms/_chain.py', 'transforms/_step.py'
ORDERS = 'transforms/chain_order_test.py void_the_guarantee'

MUTANTS = (
  # Geometry.
  Mutant(
    'gradient not projected',
    TANGENTS,
    'remove(frame.left, matmul(grads.left, frame.right_inverse))',
    'matmul(grads.left, frame.right_inverse)',
    (f'{GEOMETRY} gradients_become',),
  ),
  Mutant(
    'sum not projected',
    TANGENTS,
    'return TangentSum(left.outside(), right)\n',
    'return TangentSum(left, right)\n',
    (f'{GEOMETRY}/sums_test.py projection',),
  ),
  Mutant(
    'squares of a sum without the frame',
    TANGENTS,
    'return total + mixed + mixed.mT + gram(self.shift, of_shift)',
    'return total + mixed + mixed.mT',
    (f'{GEOMETRY}/sums_test.py dense_matrices',),
  ),
  Mutant(
    'what lies along the basis forgets a shift',
    TANGENTS,
    'along=self.along + matmul(self.mask, shift)',
    'along=self.along',
    (f'{GEOMETRY}/sums_test.py dense_matrices',),
  ),
  Mutant(
    'basis of lower rank taken for an orthonormal one',
    TANGENTS,
    'along=self.along + matmul(self.mask, shift)',
    'along=self.along + shift',
    (f'{GEOMETRY}/sums_test.py lower_rank',),
  ),
  Mutant(
    'sum without the shift of its second term',
    TANGENTS,
    'shift=summed.shift,',
    'shift=self.shift,',
    (f'{GEOMETRY}/sums_test.py dense_matrices',),
  ),
  Mutant(
    'C_R for C_R^-1',
    TANGENTS,
    'matmul(grads.left, frame.right_inverse)',
    'matmul(grads.left, frame.right_core)',
    (f'{GEOMETRY} gradients_become',),
  ),
  Mutant(
    'C_L^-T for C_L^-1',
    TANGENTS,
    'matmul(grads.right, frame.left_inverse),',
    'matmul(grads.right, frame.left_inverse.mT),',
    (f'{GEOMETRY} golden_lifts',),
  ),
  Mutant(
    'noise not projected on the left block',
    'fixed_rank/_lifts.py',
    'remove(frame.left, matmul(tangent.left, frame.right_mask))',
    'matmul(tangent.left, frame.right_mask)',
    (f'{GEOMETRY} project',),
  ),
  Mutant(
    'mask dropped on the right block',
    'fixed_rank/_lifts.py',
    'matmul(tangent.right, frame.left_mask),',
    'tangent.right,',
    (f'{GEOMETRY} project',),
  ),
  Mutant(
    'transport keeps the left block unprojected',
    TANGENTS,
    'return TangentSum(left.outside(), right), (turn_left, turn_right)',
    'return TangentSum(left, right), (turn_left, turn_right)',
    (f'{GEOMETRY} transport',),
  ),
  Mutant(
    'retraction ignores the core of the step',
    RETRACTION,
    '[s + core, r_right.mT]',
    '[s, r_right.mT]',
    (f'{GEOMETRY} best_approximation',),
  ),
  Mutant(
    'retraction keeps the product of the steps',
    RETRACTION,
    '[r_left, jnp.zeros_like(core)]',
    '[r_left, matmul(r_left, r_right.mT)]',
    (f'{GEOMETRY} best_approximation',),
  ),
  Mutant(
    'lost columns come back on both sides',
    'fixed_rank/_points.py',
    'u * root + jnp.where(keep_right, 0, more_u)',
    'u * root + more_u',
    (f'{GEOMETRY}/truncation_test.py different_sides',),
  ),
  Mutant(
    'sum for difference',
    'lora/_ranks.py',
    '[pair.right, -start.right]',
    '[pair.right, start.right]',
    ('lora/ranks_test.py difference_is',),
  ),
  Mutant(
    'initial factors of another scale',
    'lora/_initialization.py',
    'root = (size / module.scale) ** 0.5',
    'root = size**0.5',
    ('lora/initialization_test.py singular_values_asked',),
  ),
  Mutant(
    'residual that forgets the scale',
    'lora/_initialization.py',
    'matrices - module.scale * matmul(left, right.mT)',
    'matrices - matmul(left, right.mT)',
    ('lora/initialization_test.py best_approximation',),
  ),
  Mutant(
    'merge that forgets the scale',
    'lora/_merging.py',
    'z = place.module.scale * matmul(left, right.mT)',
    'z = matmul(left, right.mT)',
    ('lora/merging_test.py another_order',),
  ),
  Mutant(
    'alpha over the rank of another module',
    'lora/_peft_files.py',
    'divisor = math.sqrt(rank) if',
    "divisor = config['r'] if",
    ('lora/peft_test.py stabilised',),
  ),
  Mutant(
    'rank of the file not compared with the configuration',
    'lora/_peft_files.py',
    'not a.shape[0] == b.shape[1] == rank:',
    'not a.shape[0] == b.shape[1]:',
    ('lora/peft_test.py bad_tensors',),
  ),
  Mutant(
    'scale of the file forgotten',
    'lora/_peft.py',
    'root = (scales[path] / module.scale) ** 0.5',
    'root = (module.scale / module.scale) ** 0.5',
    ('lora/peft_test.py made_up_for',),
  ),
  Mutant(
    'pattern that matches from the end',
    'lora/_peft_files.py',
    "return '^' + re.escape(name)",
    'return re.escape(name)',
    ('lora/peft_test.py mixed_ranks',),
  ),
  # Clip.
  Mutant(
    'no clip',
    '_per_example.py',
    'bound / jnp.maximum(norm, bound)',
    '1 + 0 * norm',
    (CLIP,),
  ),
  Mutant(
    'the weight of an example forgotten',
    INTRINSIC_CLIP,
    'y * (weight / normalize_by)',
    'y / normalize_by',
    (CLIP,),
  ),
  Mutant(
    'realised batch size as divisor',
    INTRINSIC_CLIP,
    'y * (weight / normalize_by)',
    'y * (weight / len(jax.tree.leaves(grads)[0]))',
    (CLIP,),
  ),
  Mutant(
    'other leaves outside of the norm',
    INTRINSIC_CLIP,
    'jax.tree.leaves(x), l2_clip_norm',
    'jax.tree.leaves(x.pairs), l2_clip_norm',
    (CLIP,),
  ),
  Mutant(
    'examples that are not finite count',
    '_per_example.py',
    'counts = jnp.isfinite(squared_norm)',
    'counts = squared_norm == squared_norm',
    (
      'core/per_example_test.py',
      'transforms/sensitivity_test.py',
    ),
  ),
  Mutant(
    'zero times infinity',
    INTRINSIC_CLIP,
    'jnp.where(counts, y * (weight / normalize_by), 0)',
    'y * (weight / normalize_by)',
    ('transforms/sensitivity_test.py intrinsic_clip_moves',),
  ),
  Mutant(
    'zero times infinity, matrix by matrix',
    'transforms/_matrix_clip.py',
    'jnp.where(counts, out[i] * across, 0)',
    'out[i] * across',
    ('transforms/matrix_clip_test.py',),
  ),
  Mutant(
    'padding counts',
    '_per_example.py',
    'jnp.where(is_padding, 0, x)',
    'x',
    (
      'core/per_example_test.py',
      CLIP,
    ),
  ),
  Mutant(
    'sensitivity of replacement not doubled',
    '_per_example.py',
    'return 2 * bound',
    'return bound',
    ('core/per_example_test.py by_relation',),
  ),
  Mutant(
    'clip inside of a mask',
    '_per_example.py',
    '  if hidden:\n',
    '  if len(hidden) > 99:\n',
    ('integration/masks_test.py no_mask',),
  ),
  Mutant(
    'clip inside of an accumulation',
    '_per_example.py',
    'if shapes and shapes ==',
    'if not shapes and shapes ==',
    ('integration/multi_steps_test.py front',),
  ),
  # Noise.
  Mutant(
    'noise key used again',
    PRIVATIZER,
    'next_key, key = _randomness.split(state)',
    'next_key = key = state',
    (NOISE,),
  ),
  Mutant(
    'correlated noise in moving coordinates',
    'transforms/_correlated.py',
    'bases = map_pairs(turned_bases, step.frames, turn)',
    'bases = state.bases',
    ('transforms/correlated_test.py dense_product',),
  ),
  Mutant(
    'turned into fixed coordinates, not back',
    'transforms/_correlated.py',
    'projected(frame, from_fixed(x, w))',
    'projected(frame, x)',
    ('transforms/correlated_test.py dense_product',),
  ),
  Mutant(
    'one release beyond the horizon',
    PRIVATIZER,
    'within = count < steps',
    'within = count <= steps',
    ('transforms/privatizer_test.py beyond',),
  ),
  Mutant(
    'correlated noise accounted for a single participation',
    'accounting/_matrix_mechanism.py',
    'if possible == 1:',
    'if possible >= 1:',
    ('accounting/matrix_mechanism_test.py',),
  ),
  Mutant(
    'the same noise in every leaf',
    '_lattice.py',
    'jnp.asarray(s, dtype), jnp.uint32(i)',
    'jnp.asarray(s, dtype), jnp.uint32(0)',
    ('core/lattice_test.py leaves_are_independent',),
  ),
  Mutant(
    'half the noise',
    PRIVATIZER,
    '_lattice.add_noise(key, updates, stddevs)',
    '_lattice.add_noise(key, updates, 0.5 * stddevs)',
    (NOISE,),
  ),
  Mutant(
    'variance for standard deviation',
    PRIVATIZER,
    '_lattice.add_noise(key, updates, stddevs)',
    '_lattice.add_noise(key, updates, stddevs * stddevs)',
    (NOISE,),
  ),
  Mutant(
    'an entry of the noise for each row',
    '_generators.py',
    'total += jnp.uint32(stride) * iota',
    'total += jnp.uint32(stride // 7) * iota',
    ('core/generators_test.py',),
  ),
  Mutant(
    'one rotation of the generator wrong',
    '_generators.py',
    '(13, 27), (23, 5)',
    '(13, 27), (23, 6)',
    ('core/generators_test.py',),
  ),
  Mutant(
    'ChaCha20 without its diagonals',
    '_generators.py',
    'for turn in (0, 1):',
    'for turn in (0, 0):',
    ('core/generators_test.py chacha20',),
  ),
  Mutant(
    'the key of a state stays under ChaCha20',
    '_randomness.py',
    'return keys[0], keys[1]',
    'return prng_key, keys[1]',
    ('core/randomness_test.py forgets',),
  ),
  Mutant(
    'a bad basis by Cholesky is used',
    'fixed_rank/_retraction.py',
    'jnp.all(size <= _LARGEST_INVERSE * outer.shape[-1])',
    'jnp.all(size > 0)',
    (f'{GEOMETRY} retract',),
  ),
  Mutant(
    'the polar factor without its guard',
    '_linalg.py',
    'jnp.max(distance) <= 0.25**2',
    'jnp.max(distance) <= 1e9',
    ('core/linalg_test.py',),
  ),
  Mutant(
    'other leaves without noise',
    PRIVATIZER,
    'return noisy.map_pairs(',
    'return noisy._replace(others=stacks.others).map_pairs(',
    (f'{NOISE} other_leaves',),
  ),
  Mutant(
    'a seed known to everybody',
    '_randomness.py',
    'os.urandom(4 * math.prod(shape))',
    'bytes(4 * math.prod(shape))',
    ('core/randomness_test.py',),
  ),
  Mutant(
    'half the noise on an exact sum',
    PRIVATIZER,
    'exact(stddev)',
    'exact(0.5 * stddev)',
    ('audit/exact_release_test.py size',),
  ),
  Mutant(
    'a float sum behind the clip',
    PRIVATIZER,
    'if exact is None or no_noise:',
    'if True:',
    ('audit/exact_release_test.py any_order',),
  ),
  Mutant(
    'contributions rounded to nearest',
    '_lattice.py',
    'jnp.trunc(x / unit)',
    'jnp.round(x / unit)',
    ('core/lattice_test.py truncation',),
  ),
  Mutant(
    'a threshold without its low bits',
    '_lattice.py',
    'd >> twelve < low >> twelve',
    'd >> twelve < low',
    ('core/lattice_test.py words',),
  ),
  Mutant(
    'a uniform position twice',
    '_lattice.py',
    '((c >> twelve) & inside)',
    '(c & inside)',
    ('core/lattice_test.py words',),
  ),
  Mutant(
    'noise of the sum on the mean',
    'aliases/_prism.py',
    'return noise_multiplier * l2_clip_norm / expected_batch_size',
    'return noise_multiplier * l2_clip_norm',
    ('aliases/prism_test.py padding',),
  ),
  # Preconditioner.
  Mutant(
    'transport forgotten',
    PRECONDITIONER,
    '  if transport:\n',
    '  if transport is None:\n',
    (GAUGE,),
  ),
  Mutant(
    'second moments not transported',
    PRECONDITIONER,
    'turned(moments.nu)',
    'moments.nu',
    (GAUGE,),
  ),
  Mutant(
    'noise covariance not transported',
    PRECONDITIONER,
    'turned(moments.noise)',
    'moments.noise',
    (GAUGE, DEFICIENT),
  ),
  Mutant(
    'overlaps for their polar factors',
    PRECONDITIONER,
    'on_both_sides(_linalg.polar, *overlaps)',
    'overlaps',
    (TRAJECTORY,),
  ),
  Mutant(
    'core counted on one side only',
    PRECONDITIONER,
    'x.right.squares() / n',
    '(x.right.squares() - gram(x.right.along, x.right.along)) / n',
    (TRAJECTORY,),
  ),
  Mutant(
    "second moments over each other's dimension",
    PRECONDITIONER,
    '+ gram(core, core)) / m',
    '+ gram(core, core)) / n',
    (TRAJECTORY,),
  ),
  Mutant(
    'average in the old bases',
    PRECONDITIONER,
    'Factors(frame.left, frame.right),',
    'moments.bases,',
    (TRAJECTORY,),
  ),
  Mutant(
    'core of the average from the new gradient alone',
    PRECONDITIONER,
    'mu.right.along.mT',
    'x.right.along.mT',
    (TRAJECTORY,),
  ),
  Mutant(
    'core preconditioned from one side',
    PRECONDITIONER,
    'core = (matmul(p_right, core) + matmul(core, p_left)) / 2',
    'core = matmul(p_right, core)',
    (TRAJECTORY,),
  ),
  Mutant(
    'noise counted in masked directions',
    PRECONDITIONER,
    'variance * frame.left_mask',
    'variance * (frame.left_mask + jnp.eye(frame.left_mask.shape[-1])) / 2',
    ('transforms/rank_preconditioner_test.py counted_where',),
  ),
  Mutant(
    'bias correction of the noise forgotten',
    PRECONDITIONER,
    'lambda x: x / options.nu_correction, moments.noise',
    'lambda x: x, moments.noise',
    (TRAJECTORY,),
  ),
  Mutant(
    'no floor',
    PRECONDITIONER,
    'floor_factor * trace / jnp.maximum(observed, 1)',
    'floor_factor * 0 * trace',
    ('transforms/rank_preconditioner_test.py floor_bounds',),
  ),
  Mutant(
    'schedule of the noise one step late',
    'transforms/_rank_preconditioner.py',
    'variance_at(noise_stddev, state.count)',
    'variance_at(noise_stddev, state.count - 1)',
    ('transforms/rank_preconditioner_test.py schedule_of_the_noise',),
  ),
  Mutant(
    'decay by the transposed core',
    'transforms/_descent.py',
    'core = matmul(frame.right_core, frame.left_core.mT)',
    'core = matmul(frame.left_core, frame.right_core.mT)',
    ('transforms/add_decayed_factors_test.py',),
  ),
  # Accounting.
  Mutant(
    'probes with the key of the noise',
    'aliases/_dp_muon.py',
    'jax.random.key_data(jax.random.fold_in(key, _PROBES))',
    'jax.random.key_data(key)',
    ('aliases/dp_muon_test.py keys_of_probes_and_noise',),
  ),
  Mutant(
    'several clipped matrices with the multiplier of one',
    'transforms/_clip_groups.py',
    'return [noise_multiplier * math.sqrt(len(sizes))] * len(sizes)',
    'return [noise_multiplier] * len(sizes)',
    ('transforms/clip_groups_test.py',),
  ),
  Mutant(
    'every leaf clipped by itself, and noise for one group of all biases',
    'transforms/_matrix_clip.py',
    '    return _clip_groups.clip_groups(\n',
    '    if weight_dimension_numbers is None:\n'
    '      return [\n'
    '        ClipGroup((i,), (), 1, x.size, l2_clip_norms)\n'
    '        for i, x in enumerate(jax.tree.leaves(params))\n'
    '      ]\n'
    '    return _clip_groups.clip_groups(\n',
    ('integration/clip_routes_test.py clip_each_matrix',),
  ),
  Mutant(
    'clipped examples that are not divided',
    'transforms/_matrix_clip.py',
    '[x / normalize_by for x in clipped]',
    'clipped',
    ('transforms/matrix_clip_test.py loops',),
  ),
  Mutant(
    'tokens of several examples in one copy',
    'lora/_per_example.py',
    'fits = fits and x.shape[0] == size\n',
    'fits = fits and x.shape[0] % size == 0\n',
    ('lora/batched_backward_test.py time_major',),
  ),
  Mutant(
    'calibration stops above the target',
    'accounting/_epsilon.py',
    '      last = -1\n  return math.exp(high)',
    '      last = -1\n  return math.exp(low)',
    ('accounting/calibration_test.py promised or jumps',),
  ),
  Mutant(
    'a refund gives budget back',
    'accounting/_filters.py',
    'if not all(cost >= 0 for cost in costs):',
    'if False:',
    ('accounting/budget_test.py gives_budget_back',),
  ),
  Mutant(
    'every Renyi order has all of delta',
    'accounting/_filters.py',
    'delta / len(self._FACTORS)',
    'delta',
    ('accounting/filters_test.py share_delta',),
  ),
  Mutant(
    'rows of a ledger are not checked',
    'accounting/_ledger.py',
    'if stored != _hash(head, *row):',
    'if False:',
    ('accounting/tampering_test.py by_hand',),
  ),
  Mutant(
    'nobody looks at the end of a ledger',
    'accounting/_ledger.py',
    'if connection.execute(end).fetchall() != [(head, number or None)]:',
    'if False:',
    ('accounting/tampering_test.py by_hand or at_the_end',),
  ),
  Mutant(
    'rows in front of a ledger are passed over',
    'accounting/_ledger.py',
    '(number or -math.inf,)',
    '(number,)',
    ('accounting/tampering_test.py by_hand',),
  ),
  Mutant(
    'a row of a ledger counts as read before it is',
    'accounting/_ledger.py',
    '      for name, filter_name, totals in',
    '      self.last = row[0], stored\n      for name, filter_name, totals in',
    ('accounting/tampering_test.py interrupted',),
  ),
  Mutant(
    'a ledger that is gone is begun again',
    'accounting/_ledger.py',
    '        raise _absent(path)\n      self._uri',
    '        create = not file.touch()\n      self._uri',
    ('accounting/tampering_test.py begun_once',),
  ),
  Mutant(
    'a ledger may be begun twice',
    'accounting/_ledger.py',
    '  if create:\n    if found:',
    '  if create and not found:\n    if found:',
    ('accounting/tampering_test.py begun_once',),
  ),
  Mutant(
    'a ledger of other rules is read',
    'accounting/_ledger.py',
    '  if theirs != ours:',
    '  if False:',
    ('accounting/tampering_test.py rules or versions',),
  ),
  Mutant(
    'a ledger is of any head',
    'accounting/_ledger.py',
    'if expected_head is not None and',
    'if False and',
    ('accounting/tampering_test.py older_copy',),
  ),
  Mutant(
    'a delta of a record at random passes',
    'accounting/_events.py',
    'if delta >= 1 / size:',
    'if delta > 1 / size:',
    ('accounting/delta_test.py',),
  ),
  Mutant(
    'nobody is told of a large delta',
    'accounting/_events.py',
    'delta > _LARGEST_DELTA or any',
    'any',
    ('accounting/delta_test.py',),
  ),
  Mutant(
    'a warning of a large delta names a line of ours',
    'accounting/_events.py',
    'stacklevel=3',
    'stacklevel=2',
    ('accounting/delta_test.py',),
  ),
  Mutant(
    'a search begins with any delta',
    'accounting/_epsilon.py',
    '  _events.check_delta(event(1.0), delta, dataset_size)\n',
    '',
    ('accounting/delta_test.py',),
  ),
  Mutant(
    'a budget takes a large delta without a word',
    'accounting/_budget.py',
    '    _events.check_delta(_NOTHING, delta)\n',
    '',
    ('accounting/delta_test.py',),
  ),
  Mutant(
    'a power of two that compilers cancel',
    'inference/_mechanism.py',
    'power = xp.where(unit > 1, 2.0**-64, 2.0**64).astype(states.dtype)',
    'power = 2.0**-8',
    ('inference/mechanism_test.py extreme_magnitudes',),
  ),
  Mutant(
    'hidden states are clipped to C without a margin',
    'inference/_mechanism.py',
    '* (1 - _MARGIN)',
    '* 1',
    ('inference/mechanism_test.py long_vectors',),
  ),
  Mutant(
    'padding counts in the clip of a block of hidden states',
    'inference/_mechanism.py',
    'states = xp.where(xp.asarray(mask, bool)[..., None], states, 0)',
    'pass',
    ('inference/mechanism_test.py masked_vectors',),
  ),
  # Defaults of the optimizers.
  Mutant(
    'the published optimizer decays as ours does',
    'aliases/_prism.py',
    'retract(align=True),',
    'add_decayed_factors(0.1),\n    retract(align=True),',
    ('aliases/prism_options_test.py fixed_in_published',),
  ),
  Mutant(
    'ours does not decay',
    'aliases/_prism.py',
    'weight_decay: Scalar = 0.1,\n  b1:',
    'weight_decay: Scalar = 0.0,\n  b1:',
    ('aliases/prism_options_test.py not_given',),
  ),
  Mutant(
    'ours corrects the bias of its first steps',
    'transforms/_rank_preconditioner.py',
    'bias_correction: bool = False,',
    'bias_correction: bool = True,',
    ('aliases/prism_options_test.py not_given',),
  ),
  # Chains.
  Mutant(
    'anything may stand before the clip',
    CHAIN,
    "if kind == 'clip' and i:",
    "if kind == 'clip' and i > 99:",
    (ORDERS,),
  ),
  Mutant(
    'directions may stand before the noise',
    CHAIN,
    "set(before) - {'clip', 'noise'}:",
    "set(before) - {'clip', 'noise', 'direction'}:",
    (ORDERS,),
  ),
  Mutant(
    'a retraction may stand anywhere',
    CHAIN,
    "if 'retraction' in before:",
    "if 'retraction' in before[:0]:",
    (ORDERS,),
  ),
  Mutant(
    'a clip needs no noise',
    CHAIN,
    "'noise' not in before and not noise_elsewhere",
    'not before and not noise_elsewhere',
    (ORDERS,),
  ),
  Mutant(
    'a clip that returns no coordinates may be chained',
    CHAIN,
    "if hasattr(tx, 'sensitivity'):",
    "if hasattr(tx, 'insensitivity'):",
    (ORDERS,),
  ),
  Mutant(
    'stacks of other parameters',
    'transforms/_chain.py',
    'if same and step.is_at(params, layout) else None',
    'if same else None',
    ('transforms/trail_test.py other_parameters',),
  ),
  Mutant(
    'stacks of updates that were changed',
    'transforms/_chain.py',
    'same = len(leaves) == len(references) and all(',
    'same = len(leaves) == len(references) or all(',
    ('transforms/trail_test.py were_changed',),
  ),
  # Whole trainings.
  Mutant(
    'make_private: shares of groups are not normalised',
    'training/_clipping.py',
    'whole = math.sqrt(sum(share**2 for share in self.shares.values()))',
    'whole = max(self.shares.values())',
    ('training/clipping_test.py share_the_clip_norm',),
  ),
  Mutant(
    'make_private: automatic clipping beyond the norm',
    'training/_clipping.py',
    'squared, self.stability / l2_clip_norm',
    'squared, -self.stability / l2_clip_norm',
    ('training/clipping_test.py automatic',),
  ),
  Mutant(
    'make_private: the fraction has no noise',
    'training/_clipping.py',
    '(vote,) = _lattice.add_noise(key, [votes], stddev)',
    '(vote,) = _lattice.add_noise(key, [votes], 0.0)',
    (MEASURED,),
  ),
  Mutant(
    'make_private: the fraction has one key in all steps',
    'training/_clipping.py',
    'return sums, QuantileState(norm, next_key)',
    'return sums, QuantileState(norm, state.prng_key)',
    ('audit/make_private_test.py new_key',),
  ),
  Mutant(
    'make_private: the fraction is not charged',
    'training/_make.py',
    'own = gradients_noise_multiplier(clipping, sigma, expected_batch_size)',
    'own = sigma',
    (MEASURED,),
  ),
  Mutant(
    'make_private: the fraction is charged too little',
    'training/_clipping.py',
    'votes = 2 * expected_batch_size * clipping.fraction_stddev',
    'votes = 4 * expected_batch_size * clipping.fraction_stddev',
    (MEASURED,),
  ),
  Mutant(
    'make_private: a vote moves the mean by twice as much',
    'training/_clipping.py',
    'jnp.where(below, 0.5, -0.5) / b',
    'jnp.where(below, 1.0, 0.0) / b',
    (ADVERSARIAL,),
  ),
  Mutant(
    'make_private: records that are not finite count',
    'training/_clipping.py',
    'jnp.where(counts, x * (factor / unit), 0)',
    'x * (factor / unit)',
    (ADVERSARIAL,),
  ),
  Mutant(
    'make_private: half the noise',
    'training/_make.py',
    'stddev=own * bounded.bound / expected_batch_size',
    'stddev=own * bounded.bound / expected_batch_size / 2',
    (MEASURED,),
  ),
  Mutant(
    'make_private: the batches of all runs have one seed',
    'training/_make.py',
    "key = _randomness.resolve_key('prng_key', None, (), words=4)",
    "key = _randomness.resolve_key('prng_key', 0, (), words=4)",
    ('training/private_test.py nothing_in_common',),
  ),
  Mutant(
    "make_private: a user's absent records count",
    'training/_make.py',
    'jnp.where(is_present, each, 0)',
    'each',
    ('audit/make_private_test.py missing_record',),
  ),
  Mutant(
    'make_private: padding counts',
    'training/_private.py',
    'lazy, state, params, is_padding_example=is_padding_example',
    'lazy, state, params, is_padding_example=None',
    (ADVERSARIAL,),
  ),
  Mutant(
    'make_private: one step more',
    'training/_private.py',
    'if number >= self.steps:',
    'if number > self.steps:',
    ('training/misuse_test.py beyond_the_last',),
  ),
  Mutant(
    'make_private: a batch of another run',
    'training/_private.py',
    'if batch.run != self._run(state) or batch.step != number:',
    'if batch.step != number:',
    ('training/misuse_test.py not_ours',),
  ),
  Mutant(
    'make_private: a batch a second time',
    'training/_private.py',
    'if batch.run != self._run(state) or batch.step != number:',
    'if batch.run != self._run(state):',
    ('training/misuse_test.py not_ours',),
  ),
  Mutant(
    'make_private: full batches are not in the event',
    'training/_sampling.py',
    'return None if fits else self.padded_batch_size',
    'return None',
    ('training/sampling_test.py cut_by_chance',),
  ),
  Mutant(
    'make_private: every step has the same batch',
    'training/_sampling.py',
    'spawn_key=(step,)',
    'spawn_key=(0,)',
    ('training/sampling_test.py seed_and_step',),
  ),
  Mutant(
    'make_private: a batch has the first records',
    'training/_sampling.py',
    'self.dataset_size, size, replace=False',
    'size, size, replace=False',
    ('training/sampling_test.py cut_by_chance',),
  ),
)

# What decides the guarantee: clip, noise, keys, order; batches and event.
PRIVACY = (
  '_generators.py',
  '_lattice.py',
  '_per_example.py',
  '_randomness.py',
  'training/_clipping.py',
  'training/_make.py',
  'training/_private.py',
  'training/_sampling.py',
  'transforms/_chain.py',
  'transforms/_clip_groups.py',
  'transforms/_intrinsic_clip.py',
  'transforms/_privatizer.py',
)
