"""Numerical validation of MegaMoE kernels: staging kernels, backends, and the suite that checks them."""
