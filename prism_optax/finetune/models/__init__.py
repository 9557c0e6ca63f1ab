"""Small Flax (nnx) models whose dense layers can carry LoRA adapters."""
