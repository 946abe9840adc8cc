"""Plain PyTorch references of MegaMoE data formats and arithmetic. Imports stdlib, torch and numpy only."""
