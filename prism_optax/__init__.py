"""Differentially private training of LoRA adapters with optax."""
