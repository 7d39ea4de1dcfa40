// What attention does with one tile of keys and values: scores of some rows, and weighted sums. Compiled once for each
// instruction set.
//
// For many rows a tile is packed first, for few it is read where it lies. Either way each sum has one accumulator whose order is
// fixed, so a row's bits do not depend on how many rows go through a tile together.
#pragma once

#include "attention.h"
#include "attention_bytes.h"
#include "attention_paths.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// Rows and vectors that have their sums in registers together; of values: packed, and where they lie.
#if defined(__AVX512F__)
constexpr int kChunkRows = 6;
constexpr int kScoreVectors = 4;
constexpr int kValueRows = 3;
constexpr int kValueVectors = 8;
constexpr int kUnpackedVectors = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kChunkRows = 3;
constexpr int kScoreVectors = 2;
constexpr int kValueRows = 3;
constexpr int kValueVectors = 2;
constexpr int kUnpackedVectors = 2;
#else
constexpr int kChunkRows = 2;
constexpr int kScoreVectors = 1;
constexpr int kValueRows = 2;
constexpr int kValueVectors = 1;
constexpr int kUnpackedVectors = 1;
#endif

// Rows that go through a packed tile together.
template <class Path>
constexpr int kPackedRows = kChunkRows;
#if defined(__AMX_BF16__)
template <>
constexpr int kPackedRows<AmxPath> = kAmxRows;
constexpr int kMaxPackedRows = kAmxRows;
#else
constexpr int kMaxPackedRows = kChunkRows;
#endif

// -- keys as columns ----------------------------------------------------------------------------------------------------------

template <int N>
struct Count {
  static constexpr int kValue = N;
};

// Calls visit(first_step, columns, Count of them) for all features of sixteen tokens from `feature` on, of which `rows` are the
// numbers; `N`: columns at a time.
template <class Path, class T, int N = kLanes, class Visit>
QUIRE_INLINE void for_each_key_columns(const T* const* rows, int64_t feature, int64_t head_dim, const Visit& visit) {
  typename Path::Column columns[kLanes];
  for (; feature + N * Path::kKeyInputs <= head_dim; feature += N * Path::kKeyInputs) {
    Path::template key_columns<N>(rows, feature, columns);
    visit(feature / Path::kKeyInputs, columns, Count<N>{});
  }
  if constexpr (N * Path::kKeyInputs > kLanes) {
    if (feature < head_dim) for_each_key_columns<Path, T, N / 2>(rows, feature, head_dim, visit);
  }
}

// Calls visit(token, rows) for each sixteen tokens of a tile of which some lie from `first` to `end`.
template <class T, class Visit>
QUIRE_INLINE void for_each_lanes(const Tile& tile, int first, int end, const Visit& visit) {
  for (int token = first / kLanes * kLanes; token < end; token += kLanes) {
    const T* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) rows[i] = reinterpret_cast<const T*>(tile.rows[0][token + i]);
    visit(token, rows);
  }
}

// -- values as columns ----------------------------------------------------------------------------------------------------

// The values of a tile where they lie.
template <class Path, class T>
struct UnpackedValues {
  static constexpr int kVectors = static_cast<int>(max(kUnpackedVectors / Path::kSumRegisters, Path::kColumnsTogether));
  static constexpr int kRows = kChunkRows * kUnpackedVectors / (kVectors * Path::kSumRegisters);

  const Tile* tile;

  // Rows of the next tile to fetch in each of `num_steps`.
  static int64_t num_fetches(const Ahead& ahead, int64_t num_steps) { return ceil_div(ahead.num_left, num_steps); }

  // 16 * N features of the tokens of a step.
  template <int N>
  QUIRE_INLINE void load_columns(int64_t step, int64_t feature, typename Path::Column (&columns)[N]) const {
    const T* rows[Path::kInputs];
    for (int i = 0; i < Path::kInputs; ++i) rows[i] = reinterpret_cast<const T*>(tile->rows[1][step * Path::kInputs + i]);
    Path::template value_columns<N>(rows, feature, columns);
  }
};

// The same packed.
template <class Path>
struct PackedValues {
  static constexpr int kRows = kValueRows;
  static constexpr int kVectors = kValueVectors / Path::kSumRegisters;

  const char* values;
  int64_t value_dim;

  static int64_t num_fetches(const Ahead&, int64_t) { return 1; }

  template <int N>
  QUIRE_INLINE void load_columns(int64_t step, int64_t feature, typename Path::Column (&columns)[N]) const {
    for (int i = 0; i < N; ++i) columns[i] = Path::column(values + (step * value_dim + feature + i * kLanes) * 4);
  }
};

// -- packing ------------------------------------------------------------------------------------------------------------

// Packs the keys of a tile that lie from `first` to `end`; where nobody sees any, what is there already will do.
template <class Path, class T>
void pack_keys(const Tile& tile, Ahead& ahead, int first, int end, int64_t head_dim, char* to) {
  for_each_lanes<T>(tile, first, end, [&](int token, const T* const* rows) {
    for (int i = 0; i < kLanes; i += 2) ahead.fetch();
    for_each_key_columns<Path, T>(rows, 0, head_dim, [&](int64_t step, const auto& columns, auto count) {
      char* at = to + step * kTileTokens * 4 + token * 4;
#pragma GCC unroll 16
      for (int i = 0; i < decltype(count)::kValue; ++i) store_bits(at + i * kTileTokens * 4, columns[i]);
    });
  });
}

// The same of values.
template <class Path, class T>
void pack_values(const Tile& tile, Ahead& ahead, int first, int end, int64_t value_dim, char* to) {
  constexpr int kTogether = Path::kColumnsTogether;
  const int64_t end_step = round_up(ceil_div(end, Path::kInputs), Path::kGroupSteps);
  for (int64_t step = first / Path::kInputs / Path::kGroupSteps * Path::kGroupSteps; step < end_step; ++step) {
    ahead.fetch();
    const UnpackedValues<Path, T> values{&tile};
    const auto pack = [&](int64_t feature, auto count) {
      typename Path::Column columns[decltype(count)::kValue];
      values.load_columns(step, feature, columns);
      for (const auto& column : columns) {
        store_bits(to + (step * value_dim + feature) * 4, column);
        feature += kLanes;
      }
    };
    int64_t feature = 0;
    for (; feature + kTogether * kLanes <= value_dim; feature += kTogether * kLanes) pack(feature, Count<kTogether>{});
    for (; feature < value_dim; feature += kLanes) pack(feature, Count<1>{});
  }
}

// -- scores of R rows --------------------------------------------------------------------------------------------------------

// The keys of a tile that some of the rows see: from `first` to `end`.
struct Seen {
  int first;
  int end;
};

// Scores of V vectors of packed keys.
template <class Path, bool kFetches, int R, int V>
QUIRE_INLINE void score_vectors(const typename Path::Number* rows, int64_t head_dim, const char* keys, float* scores,
                                Ahead& ahead) {
  const int64_t num_steps = head_dim / Path::kKeyInputs;
  typename Path::Sum sums[R][V];
#pragma GCC unroll 24
  for (int i = 0; i < R * V; ++i) sums[i / V][i % V] = typename Path::Sum{};
#pragma GCC unroll 1
  for (int64_t step = 0; step < num_steps; ++step, keys += kTileTokens * 4) {
    if (kFetches && step % 2 == 0) ahead.fetch();
    typename Path::Column columns[V];
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) columns[i] = Path::column(keys + i * 64);
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row) {
      const auto input = Path::query_input(rows + row * head_dim, step);
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) Path::add(sums[row][i], input, columns[i]);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < R; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) Path::store_scores(scores + row * kTileTokens + i * kLanes, sums[row][i]);
  }
}

// Scores of the packed keys that are seen, and of some beside them.
template <class Path, bool kFetches, int R>
void score_rows(const typename Path::Number* rows, int64_t head_dim, Seen seen, const char* keys, float* scores, Ahead& ahead) {
  constexpr int kVectors = ceil_div(kScoreVectors, Path::kSumRegisters);
  constexpr int kFewVectors = kVectors < 2 ? kVectors : 2;
#pragma GCC unroll 1
  for (int vector = seen.first / (kFewVectors * kLanes) * kFewVectors; vector * kLanes < seen.end;) {
    const char* at = keys + vector * 64;
    const bool is_few = vector + kVectors > kTileVectors || seen.end <= (vector + kFewVectors) * kLanes;
    if (kFewVectors < kVectors && is_few) {
      score_vectors<Path, kFetches, R, kFewVectors>(rows, head_dim, at, scores + vector * kLanes, ahead);
      vector += kFewVectors;
    } else {
      score_vectors<Path, kFetches, R, kVectors>(rows, head_dim, at, scores + vector * kLanes, ahead);
      vector += kVectors;
    }
  }
}

template <class Path, int R = kChunkRows>
QUIRE_INLINE void score_packed(int num_rows, const typename Path::Number* rows, int64_t head_dim, Seen seen, const char* keys,
                               float* scores, Ahead& ahead) {
  if (num_rows == R && ahead.num_left > 0) return score_rows<Path, true, R>(rows, head_dim, seen, keys, scores, ahead);
  if (num_rows == R) return score_rows<Path, false, R>(rows, head_dim, seen, keys, scores, ahead);
  if constexpr (R > 1) score_packed<Path, R - 1>(num_rows, rows, head_dim, seen, keys, scores, ahead);
}

template <class Path>
QUIRE_INLINE void score(typename Path::Registers&, int num_rows, const typename Path::Number* rows, int64_t head_dim, Seen seen,
                        const char* keys, float* scores, Ahead& ahead) {
  score_packed<Path>(num_rows, rows, head_dim, seen, keys, scores, ahead);
}

// Scores of the keys of a tile that lie from `first` to `end`, and of some beside them.
template <class Path, class T, int R>
void score_unpacked_rows(const typename Path::Number* query, int64_t head_dim, const Tile& tile, int first, int end,
                         float* scores, Ahead& ahead) {
  // All keys of the next tile while this one's keys are read; its values are for the weighted sums.
  constexpr int64_t kFeatures = kLanes * Path::kKeyInputs;
  const int64_t num_reads = ceil_div(end - first / kLanes * kLanes, kLanes) * ceil_div(head_dim, kFeatures);
  const int64_t num_fetches = ceil_div(kTileTokens, num_reads);
  for_each_lanes<T>(tile, first, end, [&](int token, const T* const* rows) {
    typename Path::Sum sums[R];
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row) sums[row] = typename Path::Sum{};
    for_each_key_columns<Path, T>(rows, 0, head_dim, [&](int64_t step, const auto& columns, auto count) {
      for (int64_t i = 0; i < num_fetches; ++i) ahead.fetch();
      typename Path::Group groups[R];
#pragma GCC unroll 6
      for (int row = 0; row < R; ++row) groups[row].begin(sums[row]);
#pragma GCC unroll 16
      for (int i = 0; i < decltype(count)::kValue; ++i) {
#pragma GCC unroll 6
        for (int row = 0; row < R; ++row) groups[row].add(Path::query_input(query + row * head_dim, step + i), columns[i]);
      }
#pragma GCC unroll 6
      for (int row = 0; row < R; ++row) sums[row] = groups[row].total();
    });
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row) Path::store_scores(scores + row * kTileTokens + token, sums[row]);
  });
}

template <class Path, class T, int R = kChunkRows>
QUIRE_INLINE void score_unpacked(int num_rows, const typename Path::Number* query, int64_t head_dim, const Tile& tile, int first,
                                 int end, float* scores, Ahead& ahead) {
  if (num_rows == R) return score_unpacked_rows<Path, T, R>(query, head_dim, tile, first, end, scores, ahead);
  if constexpr (R > 1) score_unpacked<Path, T, R - 1>(num_rows, query, head_dim, tile, first, end, scores, ahead);
}

// -- weighted sums ------------------------------------------------------------------------------------------------------------

// totals[row] = totals[row] * factors[row] + units[row] * weights[row] x values. Only tokens that are seen have weights other than
// zero.
template <class Number>
struct WeightedSum {
  const Number* weights;  // [rows, 64]
  const float* factors;   // [rows]
  const float* units;     // [rows] 1 where weights are floats
  Seen seen;
  int64_t value_dim;
  float* totals;  // [rows, value_dim]
};

// R rows and N vectors of features.
template <class Path, bool kFetches, int R, int N, class Values>
QUIRE_INLINE void add_features(const WeightedSum<typename Path::Number>& sum, const Values& values, int first_row,
                               int64_t feature, Ahead& ahead) {
  const typename Path::Number* weights = sum.weights + first_row * kTileTokens;
  float* totals = sum.totals + first_row * sum.value_dim + feature;
  typename Path::Sum sums[R][N];
#pragma GCC unroll 24
  for (int i = 0; i < R * N; ++i) {
    sums[i / N][i % N] = Path::begin(totals + i / N * sum.value_dim + i % N * kLanes, sum.factors[first_row + i / N]);
  }
  const int64_t first_step = sum.seen.first / Path::kInputs, end_step = ceil_div(sum.seen.end, Path::kInputs);
  const int64_t num_fetches = kFetches ? Values::num_fetches(ahead, end_step - first_step) : 0;
#pragma GCC unroll 1
  for (int64_t first = first_step; first < end_step;) {
    // Without groups, all steps in one loop.
    const int64_t end = Path::kGroupSteps == 1 ? end_step : min((first / Path::kGroupSteps + 1) * Path::kGroupSteps, end_step);
    typename Path::Group groups[R][N];
#pragma GCC unroll 24
    for (int i = 0; i < R * N; ++i) groups[i / N][i % N].begin(sums[i / N][i % N]);
#pragma GCC unroll 1
    for (int64_t step = first; step < end; ++step) {
      for (int64_t i = 0; i < num_fetches; ++i) ahead.fetch();
      decltype(Path::input(weights, 0)) inputs[R];
#pragma GCC unroll 6
      for (int row = 0; row < R; ++row) inputs[row] = Path::input(weights + row * kTileTokens, step);
      typename Path::Column columns[N];
      values.load_columns(step, feature, columns);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
#pragma GCC unroll 6
        for (int row = 0; row < R; ++row) groups[row][i].add_values(inputs[row], columns[i]);
      }
    }
#pragma GCC unroll 24
    for (int i = 0; i < R * N; ++i) sums[i / N][i % N] = groups[i / N][i % N].total();
    first = end;
  }
#pragma GCC unroll 24
  for (int i = 0; i < R * N; ++i) {
    const int row = first_row + i / N;
    Path::end(totals + i / N * sum.value_dim + i % N * kLanes, sum.factors[row], sums[i / N][i % N], sum.units[row]);
  }
}

template <class Path, int N, class Values, int R = Values::kRows>
QUIRE_INLINE void add_rows(int num_rows, const WeightedSum<typename Path::Number>& sum, const Values& values, int first_row,
                           int64_t feature, Ahead& ahead) {
  if (num_rows == R && ahead.num_left > 0) return add_features<Path, true, R, N>(sum, values, first_row, feature, ahead);
  if (num_rows == R) return add_features<Path, false, R, N>(sum, values, first_row, feature, ahead);
  if constexpr (R > 1) add_rows<Path, N, Values, R - 1>(num_rows, sum, values, first_row, feature, ahead);
}

template <class Path, class Values, int N = Values::kVectors>
QUIRE_INLINE void add_vectors(int num_vectors, int num_rows, const WeightedSum<typename Path::Number>& sum, const Values& values,
                              int first_row, int64_t feature, Ahead& ahead) {
  if (num_vectors >= N) return add_rows<Path, N>(num_rows, sum, values, first_row, feature, ahead);
  if constexpr (N > 1) add_vectors<Path, Values, N - 1>(num_vectors, num_rows, sum, values, first_row, feature, ahead);
}

template <class Path, class Values>
void add_values(typename Path::Registers&, int num_rows, const WeightedSum<typename Path::Number>& sum, const Values& values,
                Ahead& ahead) {
  for (int row = 0; row < num_rows; row += Values::kRows) {
    const int count = num_rows - row < Values::kRows ? num_rows - row : Values::kRows;
    for (int64_t feature = 0; feature < sum.value_dim; feature += Values::kVectors * kLanes) {
      add_vectors<Path, Values>(static_cast<int>((sum.value_dim - feature) / kLanes), count, sum, values, row, feature, ahead);
    }
  }
}

}  // namespace quire::QUIRE_ISA
