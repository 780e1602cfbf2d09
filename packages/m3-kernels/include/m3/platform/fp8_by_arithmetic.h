// FP8 (E4M3, the OCP kind without infinities) to fp32 and bf16 by ordinary arithmetic. Included by platform headers after fp4_by_arithmetic.h.
#pragma once

namespace m3::platform {

// An E4M3 code as fp32, exactly. Its seven magnitude bits, put at the border of exponent and mantissa, are the value times 2^-120, subnormals
// included; magnitude 0x7F is NaN.
M3_DEVICE_INLINE float e4m3_to_float(Bits32 code) {
  const Bits32 magnitude = code & 0x7Fu;
  const float value = bits_to_float(((code & 0x80u) << 24) | (magnitude << 20)) * 0x1p120f;
  return magnitude == 0x7Fu ? bits_to_float(0x7FC00000u) : value;
}

// Four E4M3 codes, the first in the low byte, times one E8M0 scale, as two pairs of bf16. The fp32 product is exact or infinite; only below
// 2^-126 can it have more bits than bf16: there it is rounded to nearest even, once.
M3_DEVICE_INLINE void widen_fp8_by_arithmetic(Bits32 codes, Bits32 scale_code, Bits32 (&pairs)[2]) {
  const float scale = e8m0_to_float(scale_code);
  M3_UNROLL for (int pair = 0; pair < 2; ++pair) {
    Bits32 both = 0;
    M3_UNROLL for (int i = 0; i < 2; ++i) {
      const float product = e4m3_to_float(codes >> (16 * pair + 8 * i)) * scale;
      const Bits32 bits = float_to_bits(product);
      const Bits32 rounded = product != product ? 0x7FC0u : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
      both |= rounded << (16 * i);
    }
    pairs[pair] = both;
  }
}

}  // namespace m3::platform
