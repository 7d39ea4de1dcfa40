// Keys and values in 4 bits, and the rotation that they are held in: see Int4PageQuantizer in
// quire/kernels/attention/kv_quantizers.py. Compiled once for each instruction set.
#pragma once

#include "simd.h"

namespace quire::QUIRE_ISA {

// Features 2i, in the low bits, and 2i + 1, each -7 to 7 plus kInt4Zero.
struct Int4Pair {
  uint8_t bits;
};

constexpr int kInt4Zero = 8;

// Features in a number of type T in the cache.
template <class T>
constexpr int64_t kFeatures = 1;
template <>
constexpr int64_t kFeatures<Int4Pair> = 2;

// Where a feature lies, a multiple of kLanes.
template <class T>
QUIRE_INLINE const T* feature_of(const T* vector, int64_t feature) {
  return vector + feature / kFeatures<T>;
}

#if defined(__AVX512F__)
// Sixteen features plus kInt4Zero.
QUIRE_INLINE u32x16 load_int4(const Int4Pair* from) {
  const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  return bits_as<u32x16>(_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28))) & 15;
}

QUIRE_INLINE f32x16 load(const Int4Pair* from) { return convert<f32x16>(bits_as<i32x16>(load_int4(from)) - kInt4Zero); }
#else
QUIRE_INLINE f32x16 load(const Int4Pair* from) {
  i8x16 pairs{};
  std::memcpy(&pairs, from, kLanes / 2);
  const i8x16 low = pairs & 15, high = pairs >> 4 & 15;
  const i8x16 bytes = __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return load(reinterpret_cast<const int8_t*>(&bytes)) - static_cast<float>(kInt4Zero);
}
#endif

QUIRE_INLINE void store_int4(Int4Pair* to, i32x16 features) {
  const i8x16 bytes = low_bytes(features);
  for (int i = 0; i < kLanes / 2; ++i) to[i].bits = static_cast<uint8_t>(bytes[2 * i] | bytes[2 * i + 1] << 4);
}

// Lanes i and i + kHalf, where i has no bit kHalf, become their sum and their difference.
template <int kHalf, class V>
QUIRE_INLINE V sums_and_differences(V values) {
  constexpr int kCount = kLanesOf<V>;
  if constexpr (kIsPair<V> && kHalf == kCount / 2) {
    return {values.low + values.high, values.low - values.high};
  } else if constexpr (kIsPair<V>) {
    return {sums_and_differences<kHalf>(values.low), sums_and_differences<kHalf>(values.high)};
  } else {
    constexpr int H = kHalf;
    V others;
    if constexpr (kCount == 16) {
      others = __builtin_shufflevector(values, values, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H, 8 ^ H, 9 ^ H,
                                       10 ^ H, 11 ^ H, 12 ^ H, 13 ^ H, 14 ^ H, 15 ^ H);
    } else if constexpr (kCount == 8) {
      others = __builtin_shufflevector(values, values, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H);
    } else {
      others = __builtin_shufflevector(values, values, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H);
    }
    const auto is_second = (load_bits<Vector<int32_t, kCount> >(kLaneNumbers) & H) != 0;
    return others + select(is_second, -values, values);
  }
}

// Rotates `count` numbers, a multiple of kLanes, in place; twice is as they were. Fast Walsh-Hadamard transforms, each of as
// many as the largest power of two that divides `count`.
inline void rotate(float* numbers, int64_t count) {
  const int64_t width = count & -count;
  const float scale = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(width)));
  for (int64_t i = 0; i < count; i += kLanes) {
    f32x16 values = load(numbers + i) * scale;
    values = sums_and_differences<1>(values);
    values = sums_and_differences<2>(values);
    values = sums_and_differences<4>(values);
    store(numbers + i, sums_and_differences<8>(values));
  }
  for (int64_t half = kLanes; half < width; half *= 2) {
    for (int64_t first = 0; first < count; first += 2 * half) {
      for (int64_t i = first; i < first + half; i += kLanes) {
        const f32x16 a = load(numbers + i), b = load(numbers + half + i);
        store(numbers + i, a + b);
        store(numbers + half + i, a - b);
      }
    }
  }
}

// The same of numbers of any type, which stay as they are.
template <class From>
QUIRE_INLINE void rotate_into(const From* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i));
  rotate(to, count);
}

}  // namespace quire::QUIRE_ISA
