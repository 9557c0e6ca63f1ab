"""Which method for which case: four questions."""

import style
from matplotlib import patches
from matplotlib import pyplot as plt

QUESTIONS = (
  ('No training: you send out\nhidden states of a model?',
   'hidden states with noise,\nand a privacy budget'),
  ('A classifier on frozen features,\nwith few records or a small epsilon?',
   'a private head,\nfrom one release'),
  ('Full matrices,\nwithout adapters?',
   'dp_muon, or any optimizer\nof optax in make_private'),
  ('Adapters from elsewhere, or no time\nto tune rate, decay and warm-up?',
   'prism'),
)  # fmt: skip
LAST = 'prism or DP-AdamW:\nequally accurate'
WIDTH, HEIGHT, STEP = 2.9, 0.52, 0.72
ANSWER = 4.0


def box(axis, x, y, text, colour, style_of_box):
  axis.add_patch(
    patches.FancyBboxPatch(
      (x, y), WIDTH, HEIGHT, boxstyle=style_of_box, facecolor=colour,
      edgecolor='0.35', linewidth=0.8,
    )
  )  # fmt: skip
  axis.text(x + WIDTH / 2, y + HEIGHT / 2, text, ha='center', va='center')


def arrow(axis, start, end, text, **place):
  axis.annotate(
    '', end, start,
    arrowprops={'arrowstyle': '->', 'color': '0.2', 'shrinkA': 0, 'shrinkB': 0},
  )  # fmt: skip
  middle = [(a + b) / 2 for a, b in zip(start, end, strict=True)]
  axis.text(*middle, text, **place)


def main():
  rows = len(QUESTIONS)
  height = rows * STEP + HEIGHT
  figure, axis = plt.subplots(figsize=(style.WIDTH, height + 0.1))
  figure.subplots_adjust(0, 0, 1, 1)
  for i, (question, answer) in enumerate(QUESTIONS):
    y = (rows - i) * STEP
    box(axis, 0, y, question, style.PLAIN, 'square,pad=0')
    box(axis, ANSWER, y, answer, style.PUBLIC,
        'round,pad=0,rounding_size=0.12')  # fmt: skip
    middle = y + HEIGHT / 2
    arrow(axis, (WIDTH, middle), (ANSWER, middle), 'yes', ha='center',
          va='bottom')  # fmt: skip
    down = WIDTH / 2
    arrow(axis, (down, y), (down, y - STEP + HEIGHT), '  no', va='center')
  box(axis, 0, 0, LAST, style.PUBLIC, 'round,pad=0,rounding_size=0.12')
  axis.set(xlim=(-0.05, ANSWER + WIDTH + 0.05), ylim=(-0.05, height + 0.05))
  axis.axis('off')
  style.save(figure, __file__)


if __name__ == '__main__':
  main()
