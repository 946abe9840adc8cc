"""Constants of the staging arithmetic, written as bit patterns where the last bit decides a byte.

The kernels keep their own constants (a test compares them with the reference's), so that a mistake in
one place cannot agree with itself. Every float32 constant is given by its bits: no decimal literal is
rounded by a compiler here.
"""

import struct


def float32_from_bits(bits: int) -> float:
    """The float32 with these bits, as a Python float (exact)."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


# E4M3FN
E4M3_MAX = 448.0
E4M3_NAN_CODE = 0x7F

# FP8 groups
FP8_AMAX_FLOOR = float32_from_bits(0x38D1B717)  # fl(1e-4)
E4M3_MAX_RECIPROCAL = float32_from_bits(0x3B124925)  # fl(1/448): the scale is a product, not a quotient

# UE8M0
UE8M0_MIN_CODE = 1
UE8M0_MAX_CODE = 254
UE8M0_WORD_COLUMNS = 128  # one int32 word of four bytes serves 128 columns
UE8M0_MIN_GROUP = 32

# NVFP4
E2M1_MAX = 6.0
NVFP4_GROUP = 16
NVFP4_WORD_COLUMNS = 64  # one int32 word of four E4M3 bytes serves 64 columns
NVFP4_SCALE_FLOOR = 2.0**-9  # the smallest E4M3 value
NVFP4_TOKEN_AMAX_FLOOR = float32_from_bits(0x2B8CBCCC)  # fl(1e-12)
NVFP4_TOKEN_RECIPROCAL = float32_from_bits(0x39C30C31)  # fl(1/2688), 2688 = 448 * 6
E2M1_MAX_RECIPROCAL = float32_from_bits(0x3E2AAAAB)  # fl(1/6)
NVFP4_BLOCK_SATURATION = 2688.0  # above this amax the one-level scale is already 448

# Routing
PADDING_EXPERT_ID = -1
PADDING_WEIGHT = 0.0
REPLICA_HASH_MULTIPLIER = 2654435769
REPLICA_HASH_MASK = 0xFFFFFFFF
AHEAD_REPLICAS = 4  # kernels have a way of their own for each replica count up to it

# Shared-expert scale pages
PAGE_ROWS = 128
