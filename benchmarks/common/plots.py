"""One style for all plots of methods."""

# One colour a method, the same in all plots (Okabe and Ito, for all eyes).
COLOURS = {
  'prism': '#0072B2',
  'prism, paper mode': '#56B4E9',
  'prism, muon': '#009E73',
  'prism, decayed': '#0B3D91',
  'dp-adamw, decayed': '#8B3A00',
  'dp-adamw': '#D55E00',
  'lora+': '#E69F00',
  'ffa': '#CC79A7',
  'linear probe': '#000000',
  'prism, correlated noise': '#66A61E',
  'lamb': '#7F3C8D',
  'lora-rite': '#A6761D',
  'lora-rite, spectral start': '#D8B365',
  'dp-adambc': '#666666',
  'dp-muon': '#B2182B',
}


def colour(method: str) -> str:
  """The colour of a method, grey for one that has none."""
  return COLOURS.get(method, '#999999')
