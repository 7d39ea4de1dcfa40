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
  static constexpr int kKeyInputs = kInputs;
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
  static QUIRE_INLINE Input query_input(const SplitNumber* row, int64_t step) { return input(row, step); }

  // -- scores: keys are bytes without a sign, that is, more than what they stand for

  static QUIRE_INLINE void add(SplitSum& sum, Input query, Column keys) {
    sum.high = products(sum.high, keys, query.high);
    sum.low = products(sum.low, keys, query.low);
  }
  static QUIRE_INLINE void store_scores(float* to, const SplitSum& sum) { store_bits(to, (sum.high << 7) + sum.low); }
  template <class T, int kZero = 128>
  static QUIRE_INLINE f32x16 load_scores(const float* from, const QueryRow& query) {
    return convert<f32x16>(load_bits<i32x16>(from) - kZero * query.sum) * query.unit;
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
    for (int i = 0; i < kLanes; ++i) columns[i] = bits_as<u32x16>(load_bytes<N>(rows[i] + feature));
    transpose(columns);
#pragma GCC unroll 16
    for (Column& column : columns) column = column ^ 0x80808080u;
  }

  // 16 * N features of four tokens, which are a lane of a column.
  template <int N, class T>
  static QUIRE_INLINE void value_columns(const T* const* rows, int64_t feature, Column (&columns)[N]) {
    // First each token's features so that the instructions, which exchange within quarters, leave them in order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i tokens[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      tokens[i] = _mm512_permutexvar_epi32(order, load_bytes<4 * N>(rows[i] + feature));
    }
    const __m512i low[2] = {_mm512_unpacklo_epi8(tokens[0], tokens[1]), _mm512_unpacklo_epi8(tokens[2], tokens[3])};
    const __m512i high[2] = {_mm512_unpackhi_epi8(tokens[0], tokens[1]), _mm512_unpackhi_epi8(tokens[2], tokens[3])};
    columns[0] = bits_as<u32x16>(_mm512_unpacklo_epi16(low[0], low[1]));
    if constexpr (N > 1) columns[1] = bits_as<u32x16>(_mm512_unpackhi_epi16(low[0], low[1]));
    if constexpr (N > 2) columns[2] = bits_as<u32x16>(_mm512_unpacklo_epi16(high[0], high[1]));
    if constexpr (N > 3) columns[3] = bits_as<u32x16>(_mm512_unpackhi_epi16(high[0], high[1]));
  }

 private:
  // 4 * N features in bytes.
  template <int N>
  static QUIRE_INLINE __m512i load_bytes(const int8_t* from) {
    if constexpr (N == kLanes) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi32((1 << N) - 1, from);
  }

  static QUIRE_INLINE i32x16 products(i32x16 sum, u32x16 without_sign, u32x16 with_sign) {
    return bits_as<i32x16>(
        _mm512_dpbusd_epi32(bits_as<__m512i>(sum), bits_as<__m512i>(without_sign), bits_as<__m512i>(with_sign)));
  }
  static QUIRE_INLINE i32x16 products(i32x16 sum, u32x16 without_sign, uint32_t with_sign) {
    return products(sum, without_sign, broadcast<u32x16>(with_sign));
  }
};

// Takes a query for keys in four bits.
template <class From>
QueryRow take_row(const From* row, int64_t count, float scale, EvenOddNumber* to) {
  float numbers[kMaxHeadDim], ordered[kMaxHeadDim];
  for (int64_t i = 0; i < count; i += kLanes) store(numbers + i, load(row + i));
  for (int64_t i = 0; i < count; i += 8) {
    for (int64_t j = 0; j < 8; ++j) ordered[i + j / 2 + j % 2 * 4] = numbers[i + j];
  }
  return take_row(ordered, count, scale, static_cast<SplitNumber*>(to));
}

QUIRE_INLINE float store_weights(const f32x16 (&weights)[kTileTokens / kLanes], EvenOddNumber* to) {
  return store_weights(weights, static_cast<SplitNumber*>(to));
}

// Keys and values in four bits, which become columns as they lie, and then bytes.
struct Int4Path : BytesPath {
  struct QueryInput {
    Input even, odd;
  };

  using Number = EvenOddNumber;
  using Group = PlainGroup<Int4Path>;
  static constexpr int kKeyInputs = 8;

  static QUIRE_INLINE QueryInput query_input(const SplitNumber* row, int64_t step) {
    return {input(row, 2 * step), input(row, 2 * step + 1)};
  }
  static QUIRE_INLINE void add(SplitSum& sum, const QueryInput& query, Column keys) {
    BytesPath::add(sum, query.even, keys & 0x0f0f0f0f);
    BytesPath::add(sum, query.odd, keys >> 4 & 0x0f0f0f0f);
  }

  template <class T>
  static QUIRE_INLINE f32x16 load_scores(const float* from, const QueryRow& query) {
    return BytesPath::load_scores<T, kInt4Zero>(from, query);
  }

  // 8 * N features of sixteen tokens, of which each eight are a lane of a column.
  template <int N, class T>
  static QUIRE_INLINE void key_columns(const T* const* rows, int64_t feature, Column (&columns)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      columns[i] = bits_as<u32x16>(_mm512_maskz_loadu_epi32((1 << N) - 1, feature_of(rows[i], feature)));
    }
    transpose(columns);
  }

  // As before. First each token's pairs so that the instructions, which exchange within quarters, leave features in order.
  template <int N, class T>
  static QUIRE_INLINE void value_columns(const T* const* rows, int64_t feature, Column (&columns)[N]) {
    const __m512i order = _mm512_setr_epi64(kOrder, 0, kOrder + kNext, 0, kOrder + 2 * kNext, 0, kOrder + 3 * kNext, 0);
    __m512i tokens[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i pairs = _mm512_maskz_loadu_epi64((1 << N) - 1, feature_of(rows[i], feature));
      tokens[i] = _mm512_permutexvar_epi16(order, pairs);
    }
    const __m512i first = _mm512_unpacklo_epi8(tokens[0], tokens[1]), second = _mm512_unpacklo_epi8(tokens[2], tokens[3]);
    unpack(_mm512_unpacklo_epi16(first, second), columns[0], columns[N > 1 ? 1 : 0]);
    if constexpr (N > 2) unpack(_mm512_unpackhi_epi16(first, second), columns[2], columns[N > 3 ? 3 : 2]);
  }

 private:
  static constexpr int64_t kOrder = 0x000c000800040000, kNext = 0x0001000100010001;  // 16-bit words 0, 4, 8 and 12, and so on

  // Sixteen pairs of features of four tokens become two columns, of which `high` may be `low` if it is not wanted.
  static QUIRE_INLINE void unpack(__m512i pairs, Column& low, Column& high) {
    const __m512i half = _mm512_set1_epi8(15), zero = _mm512_set1_epi8(kInt4Zero);
    const __m512i even = _mm512_sub_epi8(_mm512_and_si512(pairs, half), zero);
    const __m512i odd = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(pairs, 4), half), zero);
    high = bits_as<u32x16>(_mm512_unpackhi_epi32(even, odd));
    low = bits_as<u32x16>(_mm512_unpacklo_epi32(even, odd));
  }
};

#endif

}  // namespace quire::QUIRE_ISA
