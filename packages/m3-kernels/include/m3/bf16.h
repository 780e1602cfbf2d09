// bf16 as bits: widening is exact, narrowing rounds to nearest even once.
#pragma once
#include "m3/platform.h"

namespace m3 {

M3_DEVICE_INLINE float bf16_to_float(Bits32 bits) { return platform::bits_to_float(bits << 16); }

// A NaN stays a NaN whatever its payload (the addition below could carry it into infinity).
M3_DEVICE_INLINE Bits32 float_to_bf16(float value) {
  if constexpr (platform::kRoundsToBf16) return platform::round_pair_to_bf16(value, 0.0f) & 0xFFFFu;
  const Bits32 bits = platform::float_to_bits(value);
  if (value != value) return 0x7FC0u;
  return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

// Two at once, `low` in the lower half.
M3_DEVICE_INLINE Bits32 floats_to_bf16(float low, float high) {
  if constexpr (platform::kRoundsToBf16) return platform::round_pair_to_bf16(low, high);
  return float_to_bf16(low) | (float_to_bf16(high) << 16);
}

M3_DEVICE_INLINE float round_to_bf16(float value) { return bf16_to_float(float_to_bf16(value)); }

M3_DEVICE_INLINE float lower_bf16(Bits32 pair) { return platform::bits_to_float(pair << 16); }
M3_DEVICE_INLINE float upper_bf16(Bits32 pair) { return platform::bits_to_float(pair & 0xFFFF0000u); }

}  // namespace m3
