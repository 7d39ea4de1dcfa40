// Attention over keys and values in whole numbers of eight bits and fewer, multiplied as they are: a query and the weights of a tile
// become whole numbers, too, of which each is two bytes. Sums are exact, so their order is free. Compiled once for each instruction
// set.
#pragma once

#include "attention_paths.h"
#include "int4_kv.h"
#include "simd.h"
#include "transpose.h"

namespace quire::QUIRE_ISA {

#if defined(__AVX512VNNI__)

// Of products with the higher bytes and with the lower ones.
struct SplitSum {
  i32x16 high{}, low{};
};

// Puts 32 numbers from 0 to 65535 where SplitNumber says.
QUIRE_INLINE void store_split(SplitNumber* to, i32x16 first, i32x16 second) {
  // Quarters of the two alternate in this, and each is the bytes of four numbers.
  const __m512i words = _mm512_packus_epi32(bits_as<__m512i>(first), bits_as<__m512i>(second));
  const __m512i apart = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order, _mm512_shuffle_epi8(words, apart)));
}

QUIRE_INLINE i32x16 rounded(f32x16 values) { return bits_as<i32x16>(_mm512_cvtps_epi32(bits_as<__m512>(values))); }

// The largest of floats that are not negative, by their bits, which have the same order; or NaN if there is one.
QUIRE_INLINE float largest_of(u32x16 floats) {
  const uint32_t bits = _mm512_reduce_max_epu32(bits_as<__m512i>(floats));
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  return largest;
}

// A query of `count` numbers, a multiple of kLanes, as whole numbers of 15 bits with their sign, zeros behind them up to 2 * kLanes.
// If one of them is not finite, the unit is NaN.
template <class From>
QueryRow take_row(const From* row, int64_t count, float scale, SplitNumber* to) {
  constexpr float kMost = 127 * 128 + 63;
  u32x16 largest{};
  for (int64_t i = 0; i < count; i += kLanes) largest = maximum(largest, bits_as<u32x16>(load(row + i)) & 0x7fffffff);
  const float limit = largest_of(largest);
  const float inverse = limit > 0.0f ? kMost / limit : 0.0f;
  i32x16 sum{};
  // Both bytes have a sign, and the higher ones count 128 times.
  const auto split = [&](int64_t at) {
    if (at >= count) return i32x16{};
    const i32x16 steps = rounded(load(row + at) * inverse), high = (steps + 64) >> 7;
    sum += steps;
    return (high << 8 & 0xff00) | ((steps - (high << 7)) & 0xff);
  };
  for (int64_t i = 0; i < count; i += 2 * kLanes) {
    const i32x16 first = split(i);
    store_split(to + i, first, split(i + kLanes));
  }
  return {scale * (limit / kMost + (limit - limit)), _mm512_reduce_add_epi32(bits_as<__m512i>(sum))};
}

// The weights of a row in a tile, none of them negative, as whole numbers of 16 bits. Returns their unit, NaN if one of them is.
QUIRE_INLINE float store_weights(const f32x16 (&weights)[kTileTokens / kLanes], SplitNumber* to) {
  constexpr float kMost = 65535.0f;
  constexpr int kVectors = kTileTokens / kLanes;
  u32x16 bits[kVectors];
  for (int i = 0; i < kVectors; ++i) bits[i] = bits_as<u32x16>(weights[i]);
  const float limit = largest_of(maximum(maximum(bits[0], bits[1]), maximum(bits[2], bits[3])));
  const float inverse = limit > 0.0f ? kMost / limit : 0.0f;
  for (int i = 0; i < kVectors; i += 2) {
    store_split(to + i * kLanes, rounded(weights[i] * inverse), rounded(weights[i + 1] * inverse));
  }
  return limit / kMost;
}

struct BytesPath {
  struct Input {
    uint32_t high, low;
  };

  using Number = SplitNumber;
  using Column = u32x16;  // four bytes
  using Sum = SplitSum;
  using Group = PlainGroup<BytesPath>;
  using Registers = NoRegisters;
  static constexpr int kInputs = 4;
  static constexpr int kGroupSteps = 1;
  static constexpr int kSumRegisters = 2;
  static constexpr int kColumnsTogether = 4;  // of values, that are made in one go

  static QUIRE_INLINE Column column(const char* at) { return load_bits<Column>(at); }
  static QUIRE_INLINE Input input(const SplitNumber* row, int64_t step) {
    Input input;
    std::memcpy(&input.high, row + kInputs * step, kInputs);
    std::memcpy(&input.low, row + kInputs * step + kInputs / 2, kInputs);
    return input;
  }

  // -- scores: keys are bytes without a sign, that is, more than what they stand for

  static QUIRE_INLINE void add(SplitSum& sum, Input query, Column keys) {
    sum.high = products(sum.high, keys, query.high);
    sum.low = products(sum.low, keys, query.low);
  }
  static QUIRE_INLINE void store_scores(float* to, const SplitSum& sum) { store_bits(to, (sum.high << 7) + sum.low); }
  template <class T>
  static QUIRE_INLINE f32x16 load_scores(const float* from, const QueryRow& query) {
    return convert<f32x16>(load_bits<i32x16>(from) - kZero<T> * query.sum) * query.unit;
  }

  // -- weighted sums

  static QUIRE_INLINE void add_values(SplitSum& sum, Input weights, Column values) {
    sum.high = products(sum.high, broadcast<u32x16>(weights.high), values);
    sum.low = products(sum.low, broadcast<u32x16>(weights.low), values);
  }
  static QUIRE_INLINE SplitSum begin(const float*, float) { return {}; }
  static QUIRE_INLINE void end(float* totals, float factor, const SplitSum& sum, float unit) {
    const f32x16 before = load(totals) * factor, values = convert<f32x16>((sum.high << 8) + sum.low);
    store(totals,
          bits_as<f32x16>(_mm512_fmadd_ps(bits_as<__m512>(values), bits_as<__m512>(splat(unit)), bits_as<__m512>(before))));
  }

  // -- columns

  // 4 * N features of sixteen tokens, of which each four are a lane of a column.
  template <int N, class T>
  static QUIRE_INLINE void key_columns(const T* const* rows, int64_t feature, Column (&columns)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) columns[i] = bits_as<u32x16>(load_bytes<N>(feature_of(rows[i], feature)));
    transpose(columns);
    if constexpr (kZero<T> == 128) {
#pragma GCC unroll 16
      for (Column& column : columns) column = column ^ 0x80808080u;
    }
  }

  // 16 * N features of four tokens, which are a lane of a column.
  template <int N, class T>
  static QUIRE_INLINE void value_columns(const T* const* rows, int64_t feature, Column (&columns)[N]) {
    // First each token's features so that the instructions, which exchange within quarters, leave them in order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i tokens[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512i bytes = load_bytes<4 * N>(feature_of(rows[i], feature));
      if constexpr (kZero<T> != 128) bytes = _mm512_sub_epi8(bytes, _mm512_set1_epi8(kZero<T>));
      tokens[i] = _mm512_permutexvar_epi32(order, bytes);
    }
    const __m512i low[2] = {_mm512_unpacklo_epi8(tokens[0], tokens[1]), _mm512_unpacklo_epi8(tokens[2], tokens[3])};
    const __m512i high[2] = {_mm512_unpackhi_epi8(tokens[0], tokens[1]), _mm512_unpackhi_epi8(tokens[2], tokens[3])};
    columns[0] = bits_as<u32x16>(_mm512_unpacklo_epi16(low[0], low[1]));
    if constexpr (N > 1) columns[1] = bits_as<u32x16>(_mm512_unpackhi_epi16(low[0], low[1]));
    if constexpr (N > 2) columns[2] = bits_as<u32x16>(_mm512_unpacklo_epi16(high[0], high[1]));
    if constexpr (N > 3) columns[3] = bits_as<u32x16>(_mm512_unpackhi_epi16(high[0], high[1]));
  }

 private:
  // By how much a byte of the keys is more than what it stands for.
  template <class T>
  static constexpr int kZero = 128;

  // 4 * N features in bytes.
  template <int N>
  static QUIRE_INLINE __m512i load_bytes(const int8_t* from) {
    if constexpr (N == kLanes) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi32((1 << N) - 1, from);
  }
  template <int N>
  static QUIRE_INLINE __m512i load_bytes(const Int4Pair* from) {
    const __m256i pairs = _mm256_maskz_loadu_epi16((1u << N) - 1, from);
    const __m512i words = _mm512_cvtepu8_epi16(pairs);
    return _mm512_and_si512(_mm512_or_si512(words, _mm512_slli_epi16(words, 4)), _mm512_set1_epi8(15));
  }

  static QUIRE_INLINE i32x16 products(i32x16 sum, u32x16 without_sign, u32x16 with_sign) {
    return bits_as<i32x16>(
        _mm512_dpbusd_epi32(bits_as<__m512i>(sum), bits_as<__m512i>(without_sign), bits_as<__m512i>(with_sign)));
  }
  static QUIRE_INLINE i32x16 products(i32x16 sum, u32x16 without_sign, uint32_t with_sign) {
    return products(sum, without_sign, broadcast<u32x16>(with_sign));
  }
};
template <>
constexpr int BytesPath::kZero<Int4Pair> = kInt4Zero;

#endif

}  // namespace quire::QUIRE_ISA
