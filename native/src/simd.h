// Vectors of sixteen lanes on every instruction set: one register with AVX-512, two with AVX2, four with SSE or NEON. The
// lanes are the same everywhere, so that a kernel adds in the same order everywhere.
//
// Files that include this are compiled once for each instruction set, into the namespace QUIRE_ISA. They use no templates of
// the standard library: a copy with AVX-512 in it could be the one that the linker keeps for everybody.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "types.h"

namespace quire::QUIRE_ISA {

constexpr int kLanes = 16;

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));
using i8x16 = int8_t __attribute__((vector_size(16)));

#define QUIRE_INLINE inline __attribute__((always_inline))

// Bits of one vector type as another of the same size.
template <class To, class From>
QUIRE_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return (To)from;  // a cast between vector types keeps the bits
}

QUIRE_INLINE f32x16 splat(float value) { return value - f32x16{}; }

QUIRE_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
QUIRE_INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

QUIRE_INLINE f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }
QUIRE_INLINE f32x16 minimum(f32x16 a, f32x16 b) { return a < b ? a : b; }

QUIRE_INLINE float bf16_to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Round to nearest, ties to even; a NaN stays one.
QUIRE_INLINE bf16 float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

QUIRE_INLINE float to_float(float value) { return value; }
QUIRE_INLINE float to_float(bf16 value) { return bf16_to_float(value); }
QUIRE_INLINE float to_float(fp16 value) { return static_cast<float>(value.number); }

template <class T>
QUIRE_INLINE T from_float(float value);
template <>
QUIRE_INLINE float from_float<float>(float value) {
  return value;
}
template <>
QUIRE_INLINE bf16 from_float<bf16>(float value) {
  return float_to_bf16(value);
}
template <>
QUIRE_INLINE fp16 from_float<fp16>(float value) {
  return {static_cast<half>(value)};
}

// -- sixteen numbers of memory as floats, at any address ---------------------------------------------------------------

QUIRE_INLINE f32x16 load(const float* from) {
  f32x16 result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

// Sixteen 16-bit numbers in 32 bits each. GCC makes several instructions of a conversion where there is one.
QUIRE_INLINE u32x16 load_wide(const void* from) {
#if defined(__AVX512F__)
  return bits_as<u32x16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from))));
#else
  u16x16 bits;
  std::memcpy(&bits, from, sizeof bits);
  return __builtin_convertvector(bits, u32x16);
#endif
}

QUIRE_INLINE f32x16 load(const bf16* from) { return bits_as<f32x16>(load_wide(from) << 16); }

QUIRE_INLINE f32x16 load(const fp16* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  f32x16 result;
  const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)));
  std::memcpy(&result, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&result) + 32, &high, 32);
  return result;
#else
  f32x16 result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = to_float(from[lane]);
  return result;
#endif
}

QUIRE_INLINE f32x16 load(const int8_t* from) {
#if defined(__AVX512F__)
  return bits_as<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)));
  f32x16 result;
  std::memcpy(&result, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&result) + 32, &high, 32);
  return result;
#else
  i8x16 bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, i32x16), f32x16);
#endif
}

// The low 8 bits of each lane.
QUIRE_INLINE i8x16 low_bytes(i32x16 values) {
#if defined(__AVX512F__)
  return bits_as<i8x16>(_mm512_cvtepi32_epi8(bits_as<__m512i>(values)));
#else
  return __builtin_convertvector(values, i8x16);
#endif
}

QUIRE_INLINE void store(float* to, f32x16 values) { std::memcpy(to, &values, sizeof values); }

QUIRE_INLINE void store(bf16* to, f32x16 values) {
#if defined(__AVX512BF16__)
  const auto rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(values));
  std::memcpy(to, &rounded, 32);
#else
  u32x16 bits = bits_as<u32x16>(values);
  const u32x16 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const u32x16 not_a_number = bits >> 16 | 0x40;
  const u16x16 result = __builtin_convertvector(values != values ? not_a_number : rounded, u16x16);
  std::memcpy(to, &result, sizeof result);
#endif
}

QUIRE_INLINE void store(fp16* to, f32x16 values) {
#if defined(__AVX512F__)
  const __m256i rounded = _mm512_cvtps_ph(reinterpret_cast<__m512>(values), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &rounded, 32);
#elif defined(__F16C__)
  __m256 halves[2];
  std::memcpy(halves, &values, sizeof halves);
  for (int i = 0; i < 2; ++i) {
    const __m128i rounded = _mm256_cvtps_ph(halves[i], _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to + 8 * i, &rounded, 16);
  }
#else
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = from_float<fp16>(values[lane]);
#endif
}

// The first `count` (0 to 16) numbers, with `fill` in the other lanes.
template <class T>
QUIRE_INLINE f32x16 load_some(const T* from, int count, float fill = 0.0f) {
  f32x16 result = splat(fill);
  for (int lane = 0; lane < count; ++lane) result[lane] = to_float(from[lane]);
  return result;
}

template <class T>
QUIRE_INLINE void store_some(T* to, f32x16 values, int count) {
  T whole[kLanes];
  store(whole, values);
  std::memcpy(to, whole, count * sizeof(T));
}

// -- across lanes, always as the same tree -----------------------------------------------------------------------------

QUIRE_INLINE float sum_of_lanes(f32x16 values) {
  float lanes[kLanes];
  store(lanes, values);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

QUIRE_INLINE float max_of_lanes(f32x16 values) {
  float lanes[kLanes];
  store(lanes, values);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] = lanes[lane] > lanes[lane + width] ? lanes[lane] : lanes[lane + width];
  }
  return lanes[0];
}

}  // namespace quire::QUIRE_ISA
