"""Counts of what a program does, on a text of every kind of instruction."""

from benchmarks.common import hlo

PROGRAM = """
HloModule jit_step, is_scheduled=true

%dear (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %svd = (f32[4,8]{1,0}, s8[64]{0}) custom-call(%a), custom_call_target="cusolver_gesvdj_ffi"
  ROOT %b = f32[4,8]{1,0} get-tuple-element(%svd), index=0
}

%cheap (a.1: f32[4,8]) -> f32[4,8] {
  %a.1 = f32[4,8]{1,0:T(8,128)} parameter(0)
  ROOT %c = f32[4,8]{1,0:T(8,128)} fusion(%a.1), kind=kLoop, calls=%f
}

%body (t: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %t = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %u = (s32[], f32[4,8]{1,0}) fusion(%t), kind=kLoop, calls=%f
}

%until (t.1: (s32[], f32[4,8])) -> pred[] {
  %t.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %v = pred[] fusion(%t.1), kind=kLoop, calls=%f
}

ENTRY %main (x: f32[4,8], p: pred[]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %p = pred[] parameter(1)
  %y = f32[4,8]{1,0} conditional(%p, %x, %x), true_computation=%dear, false_computation=%cheap
  %z = f32[4,8]{1,0} conditional(%p, %y, %y), branch_computations={%cheap, %dear}
  %start = f32[4,8]{1,0} all-reduce-start(%z), to_apply=%add
  %done = f32[4,8]{1,0} all-reduce-done(%start)
  %tuple = (s32[], f32[4,8]{1,0}) tuple(%p, %done)
  %loop = (s32[], f32[4,8]{1,0}) while(%tuple), condition=%until, body=%body
  %w = f32[4,8]{1,0} custom-call(%loop), custom_call_target="__cublas$gemm"
  ROOT %out = f32[4,8]{1,0} bitcast(%w)
}
"""  # noqa: E501


def test_the_cheaper_branches_count():
  # Two cheap branches, the collective, body and condition, and the product.
  assert hlo.cost(PROGRAM) == hlo.Cost(
    loops=1,
    solvers=0,
    launches=6,
    conditionals=2,
    collective_bytes=4 * 8 * 4,
  )


def test_communication_is_found_in_loops_and_branches():
  inside = '  %sum = (s32[], bf16[4,8]{1,0}) all-reduce(%t), to_apply=%add\n'
  head = '%body (t: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {\n'
  gather = '  %g = f32[8,8]{1,0} all-gather(%a), dimensions={0}\n'
  dear = '%dear (a: f32[4,8]) -> f32[4,8] {\n'
  text = PROGRAM.replace(head, head + inside).replace(dear, dear + gather)
  found = hlo.collectives(text)
  assert sorted(found, key=lambda x: (x.loops, x.bytes)) == [
    hlo.Collective('all-reduce', 4 * 8 * 4, 0),
    hlo.Collective('all-gather', 8 * 8 * 4, 0),
    hlo.Collective('all-gather', 8 * 8 * 4, 0),
    hlo.Collective('all-reduce', 4 + 4 * 8 * 2, 1),
  ]
