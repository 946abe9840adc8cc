"""Device functions of the quantizers: arithmetic only, no memory.

What must not be left to a compiler is written out:

* scales are products with constants given by their bits (`constants`), never quotients by a literal;
* where IEEE division is wanted it is `tl.div_rn`; where an fma is wanted it is `tl.fma`, and kernels are
  launched with contraction disabled (`launch`);
* float32 -> E4M3 is Triton's conversion to float8e4nv, which is cvt.rn.satfinite (NaN becomes 0x7F);
* maxima ignore NaN (`maximum_number`) or propagate it (`maximum_or_nan`), as each caller says.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
import numpy as np
import triton
import triton.language as tl

from megamoe.kernels import constants
from megamoe.kernels.interpreter import register_reduction

FP8_AMAX_FLOOR = tl.constexpr(constants.FP8_AMAX_FLOOR)
E4M3_MAX_RECIPROCAL = tl.constexpr(constants.E4M3_MAX_RECIPROCAL)
UE8M0_MIN_CODE = tl.constexpr(constants.UE8M0_MIN_CODE)
UE8M0_MAX_CODE = tl.constexpr(constants.UE8M0_MAX_CODE)
E2M1_MAX = tl.constexpr(constants.E2M1_MAX)
E2M1_MAX_RECIPROCAL = tl.constexpr(constants.E2M1_MAX_RECIPROCAL)
NVFP4_SCALE_FLOOR = tl.constexpr(constants.NVFP4_SCALE_FLOOR)
PAGE_ROWS = tl.constexpr(constants.PAGE_ROWS)


@triton.jit
def maximum_number(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.NONE)


@triton.jit
def minimum_number(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.NONE)


@triton.jit
def maximum_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def add(a, b):
    return a + b


def _quiet(values):
    """C's fmax, and so NumPy's, returns NaN for a signalling NaN; the instructions ignore those as well."""
    return (
        np.where(np.isnan(values), np.nan, values).astype(values.dtype)
        if values.dtype.kind == "f"
        else values
    )


register_reduction(maximum_number, lambda values, **kwargs: np.fmax.reduce(_quiet(values), **kwargs))
register_reduction(minimum_number, lambda values, **kwargs: np.fmin.reduce(_quiet(values), **kwargs))
register_reduction(maximum_or_nan, np.maximum.reduce)
register_reduction(add, np.add.reduce)


@triton.jit
def float_bits(value):
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def bits_float(bits):
    return bits.to(tl.float32, bitcast=True)


# --------------------------------------------------------------------------------------------- UE8M0


@triton.jit
def ue8m0_code(scale):
    """Smallest power of two not below a positive scale, as its biased exponent in [1, 254] (uint32)."""
    bits = float_bits(scale)
    code = (bits + 0x7FFFFF) >> 23  # carries into the exponent iff any mantissa bit is set
    return tl.minimum(tl.maximum(code, UE8M0_MIN_CODE), UE8M0_MAX_CODE)


@triton.jit
def ue8m0_reciprocal(code):
    """2^(127 - code), exact; 2^-127 for code 254 is a subnormal and must not be flushed."""
    return bits_float(tl.where(code == UE8M0_MAX_CODE, 0x00400000, (254 - code) << 23).to(tl.uint32))


# ----------------------------------------------------------------------------------------- FP8 groups


@triton.jit
def fp8_scale(amax):
    return maximum_number(amax, FP8_AMAX_FLOOR) * E4M3_MAX_RECIPROCAL


@triton.jit
def e4m3_code(value):
    return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def page_row(token, block_m, page_rows):
    """Row of the shared-expert scale pages that holds a token's words: int32 token, int64 row."""
    page = token // block_m
    m = token - page * block_m
    inside = (m // 128) * 128 + (m % 32) * 4 + (m % 128) // 32
    return page.to(tl.int64) * page_rows + inside


# --------------------------------------------------------------------------------------------- NVFP4
#
# Production divides twice, u = h / xs and w = u / S, and compares w with the E2M1 midpoints c. Both
# quotients are needed as correctly rounded float32, but neither needs a division instruction:
#
# * h * (1/xs) with the reciprocal as an unevaluated sum of two float32 (`reciprocal_pair`) and one fma
#   gives fl(h / xs) for every bfloat16 and float16 h and row maximum: all pairs of mantissas are tested.
# * w decides only through w > c and w >= c. S has four significant bits, so c * S is a float32, and
#   fl(u / S) compares with c as u compares with c * S. The same pair product maps c * S to c exactly and
#   its two float32 neighbours to either side of c (all 7 x 8 cases are tested); the map is monotonic.


@triton.jit
def reciprocal_pair(value):
    """(high, low) with high + low = 1 / value to about 48 bits."""
    high = tl.div_rn(1.0, value)
    low = tl.fma(-value, high, 1.0) * high
    return high, low


@triton.jit
def scale_reciprocal_pair(scale):
    """The pair for an E4M3 scale. The quotient here may be approximate (div.full, within 2 ulp):
    the low half repairs it, and the property that decides codes holds for every such start (tested)."""
    high = 1.0 / scale
    low = tl.fma(-scale, high, 1.0) * high
    return high, low


@triton.jit
def multiply_pair(value, high, low):
    return tl.fma(value, high, value * low)


@triton.jit
def nvfp4_scale_code(amax):
    """E4M3 code of max(amax / 6, 2^-9), saturating at 448; amax is not NaN."""
    return maximum_number(amax * E2M1_MAX_RECIPROCAL, NVFP4_SCALE_FLOOR).to(tl.float8e4nv)


@triton.jit
def e2m1_code_on_top(value):
    """uint32 whose four highest bits are the E2M1 code of a value in (-7, 7), ties to even codes.

    b is the power of two of the value's binade (at least 1) with its sign, so the grid step is |b| / 2.
    (The exponent of a value below 1 is covered by the bits of 1.0's.) Adding b * (2^22 + 1) leaves the value
    rounded to that step, to nearest even, in the low bits of the sum:
    bits = s << 31 | (149 + e) << 23 | (2 + k) with |b| = 2^e and k steps, and the code is 8 s + k + 2 e.
    The product adds, in its highest four bits, 2 + k (bits << 28), 2 (149 + e) (bits << 6), and 8 s + 4
    (bits, whose exponent begins with 100): 304 + 8 s + k + 2 e, where 304 is 0 modulo 16. Nothing below
    carries into them.
    """
    at_least_one = float_bits(maximum_number(tl.abs(value), 1.0))
    binade = bits_float((at_least_one | float_bits(value)) & 0xFF800000)
    total = float_bits(tl.fma(binade, 4194305.0, value))
    return total * 0x10000041


@triton.jit
def split_four(values):
    """[M, G, 4] -> its four [M, G]; without moving data where a thread holds all four."""
    even, odd = tl.split(tl.reshape(values, (values.shape[0], values.shape[1], 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def pack_e2m1(even, odd):
    """Eight E2M1 codes a uint32 word, column 0 in the lowest nibble: values [M, G, 4] -> [M, G].

    `even` and `odd` are the values of columns 0, 2, 4, 6 and 1, 3, 5, 7. Their codes are shifted in from the
    right, last column first. The sign of a zero is dropped: production's quantizers never write code 8.
    """
    even_codes, odd_codes = split_four(e2m1_code_on_top(even)), split_four(e2m1_code_on_top(odd))
    word = tl.zeros_like(even_codes[0])
    for i in tl.static_range(4):
        word = (word << 4) | (odd_codes[3 - i] >> 28)
        word = (word << 4) | (even_codes[3 - i] >> 28)
    nonzero = (word | (word >> 1) | (word >> 2)) & 0x11111111
    return word & ((nonzero << 3) | 0x77777777)
