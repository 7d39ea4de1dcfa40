// Sixteen vectors, rows and lanes exchanged.
#pragma once

#include "simd.h"

namespace quire::QUIRE_ISA {

// Row i becomes lane i of every row.
template <class V>
QUIRE_INLINE void transpose(V (&rows)[kLanesOf<V>]) {
  static_assert(kIsPair<V>);
  constexpr int kHalf = kLanesOf<V> / 2;
  HalfOf<V> quarters[2][2][kHalf];
#pragma GCC unroll 8
  for (int i = 0; i < kHalf; ++i) {
    quarters[0][0][i] = rows[i].low;
    quarters[0][1][i] = rows[i].high;
    quarters[1][0][i] = rows[kHalf + i].low;
    quarters[1][1][i] = rows[kHalf + i].high;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) transpose(quarters[i / 2][i % 2]);
#pragma GCC unroll 8
  for (int i = 0; i < kHalf; ++i) {
    rows[i] = {quarters[0][0][i], quarters[1][0][i]};
    rows[kHalf + i] = {quarters[0][1][i], quarters[1][1][i]};
  }
}

#if defined(__AVX512F__)

template <>
QUIRE_INLINE void transpose(u32x16 (&rows)[kLanes]) {
  u32x16 pairs[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    pairs[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const u32x16 a = pairs[i + j], b = pairs[i + j + 2];
      rows[i + 2 * j] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      rows[i + 2 * j + 1] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const u32x16 a = rows[j], b = rows[4 + j], c = rows[8 + j], d = rows[12 + j];
    const u32x16 ab_even = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const u32x16 ab_odd = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    const u32x16 cd_even = __builtin_shufflevector(c, d, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const u32x16 cd_odd = __builtin_shufflevector(c, d, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    pairs[j] = __builtin_shufflevector(ab_even, cd_even, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    pairs[8 + j] = __builtin_shufflevector(ab_even, cd_even, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    pairs[4 + j] = __builtin_shufflevector(ab_odd, cd_odd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    pairs[12 + j] = __builtin_shufflevector(ab_odd, cd_odd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = pairs[i];
}

#elif defined(__AVX2__)

template <>
QUIRE_INLINE void transpose(Vector<uint32_t, 8> (&rows)[8]) {
  Vector<uint32_t, 8> pairs[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto a = pairs[i / 2 * 4 + i % 2], b = pairs[i / 2 * 4 + i % 2 + 2];
    rows[i / 2 * 4 + i % 2 * 2] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    rows[i / 2 * 4 + i % 2 * 2 + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pairs[i] = __builtin_shufflevector(rows[i], rows[4 + i], 0, 1, 2, 3, 8, 9, 10, 11);
    pairs[4 + i] = __builtin_shufflevector(rows[i], rows[4 + i], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) rows[i] = pairs[i];
}

#else

template <>
QUIRE_INLINE void transpose(Vector<uint32_t, 4> (&rows)[4]) {
  const auto a = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
  const auto b = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
  const auto c = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
  const auto d = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
  rows[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
  rows[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
  rows[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
  rows[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}

#endif

}  // namespace quire::QUIRE_ISA
