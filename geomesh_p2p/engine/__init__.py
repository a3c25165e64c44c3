"""Everything that touches torch models, data and devices."""
