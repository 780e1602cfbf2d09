// The widening operations of a target by themselves, for tests: the CPU target's, or, with M3_PAIRS, those that the NVIDIA target has in
// m3/platform/fp8_by_pairs.h, on a bf16 product that rounds as its instruction is documented to.
#include <cmath>
#include <cstring>

#ifdef M3_PAIRS

#include "m3/types.h"
#define M3_DEVICE_INLINE static inline
#define M3_UNROLL

namespace m3::platform {

constexpr int kFragmentRows = 2;
struct RowsBf16 {
  Bytes16 chunk[kFragmentRows];
};

inline double bf16_value(Bits32 half) {
  const Bits32 bits = half << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
// The product of two bf16 is exact in double precision; its last place in bf16 is worth 2^-133 at least.
inline Bits32 rounded_bf16(double value) {
  if (value != value) return 0x7FFF;
  int exponent;
  std::frexp(value, &exponent);
  const double last = std::ldexp(1.0, exponent - 8 > -133 ? exponent - 8 : -133);
  const float nearest = std::isinf(value) ? static_cast<float>(value) : static_cast<float>(std::nearbyint(value / last) * last);
  Bits32 bits;
  std::memcpy(&bits, &nearest, 4);
  return bits >> 16;
}
inline Bits32 multiply_pair(Bits32 a, Bits32 b) {
  return rounded_bf16(bf16_value(a & 0xFFFF) * bf16_value(b & 0xFFFF)) | rounded_bf16(bf16_value(a >> 16) * bf16_value(b >> 16)) << 16;
}
// As in m3/platform/nvidia.h.
inline Bits32 spread_nibbles(Bits32 codes, Bits32 mask, int shift) {
  return (codes & mask) * ((1u << (6 - shift)) + (1u << (12 - shift))) & 0x81C081C0u;
}
constexpr int fp4_element(int place) { return place / 2 + 4 * (place % 2); }

}  // namespace m3::platform

#include "m3/platform/fp8_by_pairs.h"

#else
#include "m3/platform.h"
#endif

using namespace m3;

namespace {

void put(const platform::RowsBf16 (&rows)[4], int (*element)(int), Bits16* out) {
  for (int step = 0; step < 4; ++step) {
    Bits16 run[8];
    std::memcpy(run, rows[step].chunk[platform::kFragmentRows - 1].word, sizeof run);
    for (int place = 0; place < 8; ++place) out[8 * step + element(place)] = run[place];
  }
}

template <bool kAnyScale>
void widen_fp8(const unsigned char* codes, const unsigned char* scales, Bits16* out, int count) {
  for (int i = 0; i < count; ++i) {
    Bytes16 own[platform::kFragmentRows][2] = {};
    Bits32 scale_codes[platform::kFragmentRows] = {};
    std::memcpy(own[platform::kFragmentRows - 1], codes + 32 * i, 32);
    // Whatever else the word holds.
    scale_codes[platform::kFragmentRows - 1] = scales[2 * i] | static_cast<Bits32>(scales[2 * i + 1]) << 16 | 0xA500C300u;
    platform::RowsBf16 rows[4];
    platform::widen_fp8<kAnyScale>(own, scale_codes, rows);
    put(rows, [](int place) { return platform::fp8_element(place); }, out + 32 * i);
  }
}

}  // namespace

// `count` times 32 codes, the first 16 with one scale and the others with the next, to bf16 in the order of the codes.
extern "C" void widen_fp8_any(const unsigned char* codes, const unsigned char* scales, Bits16* out, int count) { widen_fp8<true>(codes, scales, out, count); }
extern "C" void widen_fp8_plain(const unsigned char* codes, const unsigned char* scales, Bits16* out, int count) { widen_fp8<false>(codes, scales, out, count); }
extern "C" void widen_fp4_e4m3(const unsigned char* codes, const unsigned char* scales, Bits16* out, int count) {
  for (int i = 0; i < count; ++i) {
    Bytes16 own[platform::kFragmentRows] = {};
    Bits32 scale_codes[platform::kFragmentRows] = {};
    std::memcpy(&own[platform::kFragmentRows - 1], codes + 16 * i, 16);
    std::memcpy(&scale_codes[platform::kFragmentRows - 1], scales + 2 * i, 2);
    platform::RowsBf16 rows[4];
    platform::widen_fp4_e4m3(own, scale_codes, rows);
    put(rows, [](int place) { return platform::fp4_element(place); }, out + 32 * i);
  }
}
