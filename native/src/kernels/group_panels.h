// How panels of weights in groups lie in memory, see linear.h, and how they are fetched.
#pragma once

#include "linear.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr int kAheadBytes = 4096;                // how far ahead of its use a weight is fetched
constexpr int kGroupHeader = kPanelColumns * 4;  // bytes of a group's scales and zeros

// Where a panel has the parts of a group, and what its sums of products become: scale * (sum - zero * sum of the inputs), of half
// the columns of a panel.
struct WholeGroup {
  static constexpr int kCommonZero = 0;  // each has its own

  const char* start;
  const char* weights;

  WholeGroup(const PackedWeight& weight, const char* panel, int64_t group)
      : start(panel + group * weight.group_bytes()), weights(start + kGroupHeader) {}
  QUIRE_INLINE void prefetch_scales() const {
    for (int at = 0; at < kGroupHeader; at += kLine) __builtin_prefetch(start + kAheadBytes + at, 0, 3);
  }
  QUIRE_INLINE f32x16 scale(int half) const { return load(scales() + half * kLanes); }
  QUIRE_INLINE f32x16 zero(int half) const { return load(scales() + kPanelColumns + half * kLanes); }
  static QUIRE_INLINE f32x16 unit(const PackedWeight& weight, const char* panel, int half) {
    return load(reinterpret_cast<const float*>(panel + weight.panel_bytes()) - kPanelColumns + half * kLanes);
  }

 private:
  QUIRE_INLINE const fp16* scales() const { return reinterpret_cast<const fp16*>(start); }
};

constexpr int kInt6Zero = 32;

struct Int6Group {
  static constexpr int kCommonZero = kInt6Zero;
  static constexpr int kHeader = kPanelColumns * 2;  // bytes of a group's scales

  const char* start;
  const char* weights;

  Int6Group(const PackedWeight& weight, const char* panel, int64_t group)
      : start(panel + group * weight.group_bytes()), weights(start + kHeader) {}
  QUIRE_INLINE void prefetch_scales() const { __builtin_prefetch(start + kAheadBytes, 0, 3); }
  QUIRE_INLINE f32x16 scale(int half) const { return load(reinterpret_cast<const fp16*>(start) + half * kLanes); }
  QUIRE_INLINE f32x16 zero(int) const { return splat(static_cast<float>(kInt6Zero)); }
  static QUIRE_INLINE f32x16 unit(const PackedWeight& weight, const char* panel, int half) {
    return WholeGroup::unit(weight, panel, half);
  }
};

// Three lines of a panel: the weights of sixteen inputs, four in each lane.
QUIRE_INLINE void unpack_int6(const char* at, u32x16 (&fours)[4]) {
  const u32x16 first = load_bits<u32x16>(at), second = load_bits<u32x16>(at + kLine), high = load_bits<u32x16>(at + 2 * kLine);
  fours[0] = (first & 0x0f0f0f0f) | (high << 4 & 0x30303030);
  fours[1] = (first >> 4 & 0x0f0f0f0f) | (high << 2 & 0x30303030);
  fours[2] = (second & 0x0f0f0f0f) | (high & 0x30303030);
  fours[3] = (second >> 4 & 0x0f0f0f0f) | (high >> 2 & 0x30303030);
}

// kZero: what stands for 0 in a kernel, which multiplies kSteps times the weights.
template <int kZero, int kSteps>
struct Float4Group {
  static constexpr int kCommonZero = kZero;

  const char* exponents;
  const char* weights;

  Float4Group(const PackedWeight& weight, const char* panel, int64_t group)
      : exponents(panel + group * kPanelColumns), weights(panel + weight.exponent_bytes() + group * weight.group_bytes()) {}
  QUIRE_INLINE void prefetch_scales() const {}
  QUIRE_INLINE f32x16 scale(int half) const {
    const auto bytes = load_bits<Vector<uint8_t, kLanes> >(exponents + half * kLanes);
    const i32x16 bits = convert<i32x16>(bytes) << 23;
    return bits_as<f32x16>(maximum(bits, i32x16{} + (1 << 22)));  // the least is not normalized
  }
  QUIRE_INLINE f32x16 zero(int) const { return splat(static_cast<float>(kZero)); }
  static QUIRE_INLINE f32x16 unit(const PackedWeight&, const char*, int) { return splat(1.0f / kSteps); }
};

// E2M1 as whole numbers: twice the number, plus kFloat4Zero.
constexpr int kFloat4Zero = 12;

#if defined(__AVX2__) || defined(__aarch64__)
alignas(64) constexpr uint8_t kFloat4Numbers[64] = {
    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#endif

// Of codes in bytes.
QUIRE_INLINE u32x16 float4_numbers(u32x16 codes) {
#if defined(__AVX512BW__)
  return bits_as<u32x16>(_mm512_shuffle_epi8(_mm512_load_si512(kFloat4Numbers), bits_as<__m512i>(codes)));
#elif defined(__AVX2__)
  const __m256i numbers = _mm256_load_si256(reinterpret_cast<const __m256i*>(kFloat4Numbers));
  using Half = decltype(codes.low);
  return {bits_as<Half>(_mm256_shuffle_epi8(numbers, bits_as<__m256i>(codes.low))),
          bits_as<Half>(_mm256_shuffle_epi8(numbers, bits_as<__m256i>(codes.high)))};
#elif defined(__aarch64__)
  u32x16 found;
  for_each_register(found, codes, [numbers = vld1q_u8(kFloat4Numbers)](auto& to, const auto& from) {
    to = bits_as<Vector<uint32_t, 4> >(vqtbl1q_u8(numbers, bits_as<uint8x16_t>(from)));
  });
  return found;
#else
  // Bit by bit: 5, 6 and 7 stand for 6, 8 and 12, smaller codes for themselves.
  const u32x16 low = codes & 0x01010101, middle = codes >> 1 & 0x01010101, high = codes >> 2 & 0x01010101;
  const u32x16 magnitude = (codes & 0x07070707) + (high & low) + ((high & middle) << 1) + ((high & middle & low) << 1);
  const u32x16 is_negative = (codes >> 3 & 0x01010101) * 255u;
  return magnitude + 0x0c0c0c0c - ((magnitude & is_negative) << 1);
#endif
}

}  // namespace quire::QUIRE_ISA
