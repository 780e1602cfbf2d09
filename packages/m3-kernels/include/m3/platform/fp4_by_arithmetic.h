// FP4 (E2M1) to bf16 by ordinary arithmetic, for targets without a conversion instruction. Included by their platform headers.
#pragma once

namespace m3::platform {

// An E8M0 scale as fp32, exactly: 2^(code - 127). Code 0 is the subnormal 2^-127, code 255 is NaN (OCP Microscaling Formats 1.0, E8M0).
M3_DEVICE_INLINE float e8m0_to_float(Bits32 code) {
  return bits_to_float(code == 0 ? 0x00400000u : code == 255 ? 0x7FC00000u : code << 23);
}

// Eight FP4 codes, the first in the low nibble, times one scale, as four pairs of bf16. The three magnitude bits of E2M1, put at the border of
// exponent and mantissa, are the value times 2^-126, subnormals included. With an E8M0 scale every product is exact in bf16, down to 0.5 * 2^-127,
// but one of 2^128 or more becomes infinity (scale codes 253 and 254 alone can make one); with an E4M3 scale every product is exact.
M3_DEVICE_INLINE void widen_fp4_by_arithmetic(Bits32 codes, float scale, Bits32 (&pairs)[4]) {
  M3_UNROLL for (int pair = 0; pair < 4; ++pair) {
    Bits32 both = 0;
    M3_UNROLL for (int i = 0; i < 2; ++i) {
      const Bits32 code = codes >> (8 * pair + 4 * i);
      const float element = bits_to_float(((code & 8u) << 28) | ((code & 7u) << 22)) * 0x1p126f;
      both |= float_to_bits(element * scale) >> 16 << (16 * i);
    }
    pairs[pair] = both;
  }
}

}  // namespace m3::platform
