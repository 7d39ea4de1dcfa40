// What attention does with one tile of keys and values: packing, scores, and weighted sums. Compiled once for each
// instruction set.
//
// There is one arithmetic path for all numbers of rows, and each sum has one accumulator whose order is fixed, so a row's bits
// do not depend on how many rows go through a tile together.
#pragma once

#include "attention.h"
#include "simd.h"
#include "transpose.h"

namespace quire::QUIRE_ISA {

// Rows and vectors that have their sums in registers together.
#if defined(__AVX512F__)
constexpr int kChunkRows = 6;
constexpr int kScoreVectors = 4;
constexpr int kValueVectors = 8;
constexpr int kValueRows = 3;
#elif defined(__AVX2__)
constexpr int kChunkRows = 3;
constexpr int kScoreVectors = 2;
constexpr int kValueVectors = 2;
constexpr int kValueRows = 3;
#else
constexpr int kChunkRows = 2;
constexpr int kScoreVectors = 1;
constexpr int kValueVectors = 1;
constexpr int kValueRows = 2;
#endif
constexpr int kTileVectors = kTileTokens / kLanes;
constexpr int kMaxHeadDim = 256;

// Where the keys and values of a tile lie, and their scales (int8 only). Tokens that nobody sees lead to zeros.
struct Tile {
  const char* rows[2][kTileTokens];  // keys, values
  alignas(64) float key_scales[kTileTokens];
  alignas(64) float value_scales[kTileTokens];
};

// The tile that comes next, fetched a row at a time all through the work on this one: a core has few lines under way at once,
// and waits when it is asked for more.
struct Ahead {
  const char* const* rows;
  int64_t num_left;
  int64_t row_bytes;

  QUIRE_INLINE void fetch() {
    if (num_left == 0) return;
    for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(*rows + at, 0, 2);
    ++rows;
    --num_left;
  }
};

// -- paths: in what numbers the products are computed ---------------------------------------------------------------------

// Pairs of bf16, summed in float32. Keys are packed as [head_dim / 2][64][2], values as [32][head_dim][2].
struct BFloat16Path {
  using Number = bf16;
  using Column = u32x16;
  static constexpr int kInputs = 2;  // numbers of a sum that one step adds

  static QUIRE_INLINE Column column(const char* at) {
    Column result;
    std::memcpy(&result, at, sizeof result);
    return result;
  }
  static QUIRE_INLINE uint32_t input(const bf16* row, int64_t step) {
    uint32_t pair;
    std::memcpy(&pair, row + 2 * step, sizeof pair);
    return pair;
  }
  static QUIRE_INLINE void add(f32x16& sum, uint32_t input, Column column) {
#if defined(__AVX512BF16__)
    sum = bits_as<f32x16>(_mm512_dpbf16_ps(bits_as<__m512>(sum), bits_as<__m512bh>(_mm512_set1_epi32(input)),
                                           bits_as<__m512bh>(column)));
#else
    sum += bf16_to_float({static_cast<uint16_t>(input)}) * bits_as<f32x16>(column << 16);
    sum += bf16_to_float({static_cast<uint16_t>(input >> 16)}) * bits_as<f32x16>(column & 0xffff0000u);
#endif
  }

  // 2 * N features, of which each pair becomes a lane. bf16 holds 8-bit numbers exactly.
  template <int N>
  static QUIRE_INLINE u32x16 load_pairs(const bf16* from) {
    u32x16 pairs{};
    std::memcpy(&pairs, from, N * 4);
    return pairs;
  }
  template <int N>
  static QUIRE_INLINE u32x16 load_pairs(const int8_t* from) {
    const f32x16 low = load(from);
    const f32x16 high = N == kLanes ? load(from + kLanes) : f32x16{};
#if defined(__AVX512BF16__)
    return bits_as<u32x16>(_mm512_cvtne2ps_pbh(bits_as<__m512>(high), bits_as<__m512>(low)));
#else
    bf16 numbers[2 * kLanes];
    store(numbers, low);
    store(numbers + kLanes, high);
    return load_pairs<kLanes>(numbers);
#endif
  }

  static QUIRE_INLINE u32x16 pair_values(const bf16* even, const bf16* odd) { return load_wide(even) | load_wide(odd) << 16; }
  static QUIRE_INLINE u32x16 pair_values(const int8_t* even, const int8_t* odd) {
    return bits_as<u32x16>(load(even)) >> 16 | bits_as<u32x16>(load(odd));  // the low halves of the odd ones are zero
  }

  // Sixteen tokens, of which `rows` are the numbers.
  template <class T>
  static QUIRE_INLINE void pack_keys(const T* const* rows, int64_t head_dim, char* to) {
    int64_t feature = 0;
    for (; feature + 2 * kLanes <= head_dim; feature += 2 * kLanes) pack_pairs<kLanes>(rows, feature, to);
    if (feature < head_dim) pack_pairs<kLanes / 2>(rows, feature, to);
  }

  // N pairs of features of sixteen tokens.
  template <int N, class T>
  static QUIRE_INLINE void pack_pairs(const T* const* rows, int64_t feature, char* to) {
    u32x16 columns[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) columns[i] = load_pairs<N>(rows[i] + feature);
    transpose(columns);
    char* at = to + feature / 2 * kTileTokens * 4;
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) std::memcpy(at + i * kTileTokens * 4, &columns[i], 64);
  }

  template <class T>
  static QUIRE_INLINE void pack_value_pair(const T* even, const T* odd, int64_t head_dim, char* to) {
    for (int64_t i = 0; i < head_dim; i += kLanes) {
      const u32x16 pair = pair_values(even + i, odd + i);
      std::memcpy(to + i * 4, &pair, sizeof pair);
    }
  }
};

// Float32 throughout. Keys are packed as [head_dim][64], values as [64][head_dim].
struct Float32Path {
  using Number = float;
  using Column = f32x16;
  static constexpr int kInputs = 1;

  static QUIRE_INLINE Column column(const char* at) { return load(reinterpret_cast<const float*>(at)); }
  static QUIRE_INLINE float input(const float* row, int64_t step) { return row[step]; }
  static QUIRE_INLINE void add(f32x16& sum, float input, Column column) { sum += input * column; }

  template <class T>
  static QUIRE_INLINE void pack_keys(const T* const* rows, int64_t head_dim, char* to) {
    for (int64_t feature = 0; feature < head_dim; feature += kLanes) {
      u32x16 columns[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) columns[i] = bits_as<u32x16>(load(rows[i] + feature));
      transpose(columns);
      char* at = to + feature * kTileTokens * 4;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) std::memcpy(at + i * kTileTokens * 4, &columns[i], 64);
    }
  }

  template <class T>
  static QUIRE_INLINE void pack_value_pair(const T* even, const T* odd, int64_t head_dim, char* to) {
    float* values = reinterpret_cast<float*>(to);
    for (int64_t i = 0; i < head_dim; i += kLanes) {
      store(values + i, load(even + i));
      store(values + head_dim + i, load(odd + i));
    }
  }
};

// -- packing ------------------------------------------------------------------------------------------------------------

// Packs the keys of a tile that lie from `first` to `end`.
template <class Path, class T>
void pack_keys(const Tile& tile, Ahead& ahead, int first, int end, int64_t head_dim, char* to) {
  for (int token = 0; token < kTileTokens; token += kLanes) {
    if (token + kLanes <= first || token >= end) continue;  // nobody sees them: what is there already will do
    const T* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      if (i % 2 == 0) ahead.fetch();
      rows[i] = reinterpret_cast<const T*>(tile.rows[0][token + i]);
    }
    Path::pack_keys(rows, head_dim, to + token * 4);
  }
}

// The same of values.
template <class Path, class T>
void pack_values(const Tile& tile, Ahead& ahead, int first, int end, int64_t head_dim, char* to) {
  for (int token = 0; token < kTileTokens; token += 2) {
    if (token + 2 <= first || token >= end) continue;
    ahead.fetch();
    const T* even = reinterpret_cast<const T*>(tile.rows[1][token]);
    const T* odd = reinterpret_cast<const T*>(tile.rows[1][token + 1]);
    Path::pack_value_pair(even, odd, head_dim, to + token * head_dim * sizeof(typename Path::Number));
  }
}

// -- scores: R rows times 64 packed keys ------------------------------------------------------------------------------------

template <class Path, bool kFetches, int R>
void score_rows(const typename Path::Number* rows, int64_t head_dim, const char* keys, float* scores, Ahead& ahead) {
  const int64_t num_steps = head_dim / Path::kInputs;
#pragma GCC unroll 1
  for (int vector = 0; vector < kTileVectors; vector += kScoreVectors) {
    f32x16 sums[R][kScoreVectors];
#pragma GCC unroll 24
    for (int i = 0; i < R * kScoreVectors; ++i) sums[i / kScoreVectors][i % kScoreVectors] = f32x16{};
    const char* at = keys + vector * 64;
#pragma GCC unroll 1
    for (int64_t step = 0; step < num_steps; ++step, at += kTileTokens * 4) {
      if (kFetches && step % 2 == 0) ahead.fetch();
      typename Path::Column columns[kScoreVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kScoreVectors; ++i) columns[i] = Path::column(at + i * 64);
#pragma GCC unroll 6
      for (int row = 0; row < R; ++row) {
        const auto input = Path::input(rows + row * head_dim, step);
#pragma GCC unroll 4
        for (int i = 0; i < kScoreVectors; ++i) Path::add(sums[row][i], input, columns[i]);
      }
    }
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row) {
#pragma GCC unroll 4
      for (int i = 0; i < kScoreVectors; ++i) store(scores + row * kTileTokens + (vector + i) * kLanes, sums[row][i]);
    }
  }
}

template <class Path, int R = kChunkRows>
QUIRE_INLINE void score(int num_rows, const typename Path::Number* rows, int64_t head_dim, const char* keys, float* scores,
                        Ahead& ahead) {
  if (num_rows == R && ahead.num_left > 0) return score_rows<Path, true, R>(rows, head_dim, keys, scores, ahead);
  if (num_rows == R) return score_rows<Path, false, R>(rows, head_dim, keys, scores, ahead);
  if constexpr (R > 1) score<Path, R - 1>(num_rows, rows, head_dim, keys, scores, ahead);
}

// -- sums: R rows of weights times the values of a tile ------------------------------------------------------------------------

// totals[row] = totals[row] * factors[row] + weights[row] x values. Tokens from `first` to `end` have weights other than zero.
template <class Number>
struct WeightedSum {
  const Number* weights;  // [rows, 64]
  const float* factors;   // [rows]
  const char* values;     // packed
  int first;
  int end;
  int64_t head_dim;
  float* totals;  // [rows, head_dim]

  // The same from a row and a feature on.
  QUIRE_INLINE WeightedSum from(int row, int64_t feature) const {
    return {weights + row * kTileTokens, factors + row, values + feature * 4, first, end, head_dim, totals + row * head_dim + feature};
  }
};

// R rows and N vectors of features.
template <class Path, bool kFetches, int R, int N>
QUIRE_INLINE void add_features(const WeightedSum<typename Path::Number>& sum, Ahead& ahead) {
  const int64_t head_dim = sum.head_dim, step_bytes = head_dim * 4;
  f32x16 sums[R][N];
#pragma GCC unroll 24
  for (int i = 0; i < R * N; ++i) sums[i / N][i % N] = load(sum.totals + i / N * head_dim + i % N * kLanes) * sum.factors[i / N];
  const int first_step = sum.first / Path::kInputs;
  const int end_step = (sum.end + Path::kInputs - 1) / Path::kInputs;
  const typename Path::Number* weights = sum.weights;
  const char* at = sum.values + first_step * step_bytes;
#pragma GCC unroll 1
  for (int step = first_step; step < end_step; ++step, at += step_bytes) {
    if (kFetches) ahead.fetch();
    decltype(Path::input(weights, 0)) inputs[R];
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row) inputs[row] = Path::input(weights + row * kTileTokens, step);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      const typename Path::Column column = Path::column(at + i * 64);
#pragma GCC unroll 6
      for (int row = 0; row < R; ++row) Path::add(sums[row][i], inputs[row], column);
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < R * N; ++i) store(sum.totals + i / N * head_dim + i % N * kLanes, sums[i / N][i % N]);
}

template <class Path, int N, int R = kValueRows>
QUIRE_INLINE void add_rows(int num_rows, const WeightedSum<typename Path::Number>& sum, Ahead& ahead) {
  if (num_rows == R && ahead.num_left > 0) return add_features<Path, true, R, N>(sum, ahead);
  if (num_rows == R) return add_features<Path, false, R, N>(sum, ahead);
  if constexpr (R > 1) add_rows<Path, N, R - 1>(num_rows, sum, ahead);
}

template <class Path, int N = kValueVectors>
QUIRE_INLINE void add_vectors(int num_vectors, int num_rows, const WeightedSum<typename Path::Number>& sum, Ahead& ahead) {
  if (num_vectors >= N) return add_rows<Path, N>(num_rows, sum, ahead);
  if constexpr (N > 1) add_vectors<Path, N - 1>(num_vectors, num_rows, sum, ahead);
}

template <class Path>
QUIRE_INLINE void add_values(int num_rows, const WeightedSum<typename Path::Number>& sum, Ahead& ahead) {
  for (int row = 0; row < num_rows; row += kValueRows) {
    const int count = num_rows - row < kValueRows ? num_rows - row : kValueRows;
    for (int64_t feature = 0; feature < sum.head_dim; feature += kValueVectors * kLanes) {
      add_vectors<Path>(static_cast<int>((sum.head_dim - feature) / kLanes), count, sum.from(row, feature), ahead);
    }
  }
}

}  // namespace quire::QUIRE_ISA
