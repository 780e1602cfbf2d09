// FP8 (E4M3) weights, and E4M3 scales of FP4 ones, to bf16 by products of bf16 pairs: integer operations, spread_nibbles and multiply_pair(a, b), the
// products of the two bf16 in each word, rounded to nearest even, subnormals included. Included by platform headers that have these.
#pragma once

namespace m3::platform {

// The magnitude bits of E4M3, put at bits 10 to 4 of a bf16, are the value times 2^-120, subnormals included; a product with a power of two makes the
// exponent and the scale, and rounds once. Codes j and j + 2 of a word lie 16 bits apart: they make a pair without being moved apart.

M3_DEVICE_INLINE constexpr int fp8_element(int place) { return place / 4 * 4 + place % 4 / 2 + place % 2 * 2; }

// The codes in the low bytes of both halves; what lies above them does not matter. kNan: whether magnitude 0x7F becomes NaN: one more carries
// into bit 7, which fills the exponent.
template <bool kNan>
M3_DEVICE_INLINE Bits32 spread_e4m3(Bits32 codes) {
  const Bits32 pattern = (codes << 8 & 0x80008000u) | (codes << 4 & 0x07F007F0u);
  return kNan ? pattern | ((codes & 0x007F007Fu) + 0x00010001u & 0x00800080u) * 0xF0u : pattern;
}

constexpr Bits32 kLargestPlainScaleOfFp8 = 134;

// 2^(code - 127) times the 2^120 that the pattern lacks, in both halves. Beyond code 134 that is no bf16: the rest is a second factor.
M3_DEVICE_INLINE Bits32 plain_scale_of_fp8(Bits32 code) { return code * 0x00800080u + 0x3C003C00u; }
M3_DEVICE_INLINE Bits32 rest_of_scale_of_fp8(Bits32 code) {
  const Bits32 beyond = code < kLargestPlainScaleOfFp8 ? 0 : code - kLargestPlainScaleOfFp8;
  return code == 255 ? 0x7FC07FC0u : beyond * 0x00800080u + 0x3F803F80u;
}

template <bool kAnyScale>
M3_DEVICE_INLINE void widen_fp8(const Bytes16 (&codes)[kFragmentRows][2], const Bits32 (&scale_codes)[kFragmentRows], RowsBf16 (&rows)[4]) {
  M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
    M3_UNROLL for (int half = 0; half < 2; ++half) {
      const Bits32 own = scale_codes[chunk] >> (16 * half) & 0xFFu;
      const Bits32 scale = plain_scale_of_fp8(kAnyScale && own > kLargestPlainScaleOfFp8 ? kLargestPlainScaleOfFp8 : own), rest = rest_of_scale_of_fp8(own);
      M3_UNROLL for (int i = 0; i < 4; ++i) {
        const Bits32 word = codes[chunk][half].word[i];
        M3_UNROLL for (int odd = 0; odd < 2; ++odd) {
          Bits32 pair = multiply_pair(spread_e4m3<kAnyScale>(word >> (8 * odd)), scale);
          if (kAnyScale) pair = multiply_pair(pair, rest);
          rows[2 * half + i / 2].chunk[chunk].word[i % 2 * 2 + odd] = pair;
        }
      }
    }
  }
}

// The scale's factor is kept 2^9 too small, at most 448 * 2^117, to be a bf16 once it makes up for the 2^126 of the FP4 pattern; a second
// factor of 2^9 makes up for that. Every product on the way is exact.
M3_DEVICE_INLINE void widen_fp4_e4m3(const Bytes16 (&codes)[kFragmentRows], const Bits32 (&scale_codes)[kFragmentRows], RowsBf16 (&rows)[4]) {
  constexpr Bits32 k2To127 = 0x7F007F00u, k2To110 = 0x76807680u, k2To9 = 0x44004400u;
  M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
    // What lies between the two codes does not matter.
    const Bits32 both = multiply_pair(multiply_pair(spread_e4m3<true>(scale_codes[chunk] | scale_codes[chunk] << 8), k2To127), k2To110);
    const Bits32 scales[2] = {(both & 0xFFFFu) * 0x10001u, (both >> 16) * 0x10001u};
    M3_UNROLL for (int run = 0; run < 4; ++run) {
      const Bits32 scale = scales[run / 2];
      const Bits32 word = codes[chunk].word[run], upper = word >> 8;
      Bits32(&pairs)[4] = rows[run].chunk[chunk].word;
      pairs[0] = multiply_pair(spread_nibbles(word, 0x000F000Fu, 0), scale);
      pairs[1] = multiply_pair(spread_nibbles(word, 0x00F000F0u, 4), scale);
      pairs[2] = multiply_pair(spread_nibbles(upper, 0x000F000Fu, 0), scale);
      pairs[3] = multiply_pair(spread_nibbles(upper, 0x00F000F0u, 4), scale);
      M3_UNROLL for (int i = 0; i < 4; ++i) pairs[i] = multiply_pair(pairs[i], k2To9);
    }
  }
}

}  // namespace m3::platform
