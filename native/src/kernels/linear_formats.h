// How the formats of weights are multiplied, and how a product is cut into tasks and tiles.
#pragma once

#include <unistd.h>

#include "bf16_pairs.h"
#include "linear.h"
#include "simd.h"
#if defined(__AMX_BF16__)
#include "amx_rows.h"
#endif

namespace quire::QUIRE_ISA {

// Rows that are computed together: as many as have their sums in registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX2__) || defined(__aarch64__)  // which has twice as many registers, of half the length
constexpr int kTileRows = 3;
#else
constexpr int kTileRows = 2;
#endif

// The same of formats whose rows an instruction multiplies in pairs, if this set has one.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kPairedRows = 6;
#else
constexpr int kPairedRows = kTileRows;
#endif

constexpr int kTasksPerThread = 64;          // wanted where there are many rows
constexpr int kMinTaskRows = 8 * kTileRows;  // fewer are not worth reading a panel again

// -- formats: how one step along the inputs adds to the sums of 2 x 16 columns --------------------------------------------

struct Float32Format {
  using Row = float;
  static constexpr DType kRowType = DType::kFloat32;
  using Sum = f32x16;
  static constexpr int kInputs = 1;  // per step
  static constexpr int kStepBytes = kPanelColumns * 4;
  using Input = float;

  static QUIRE_INLINE Input input(const Row* row, int64_t step) { return row[step]; }
  static QUIRE_INLINE void weights(const char* at, f32x16 (&columns)[2]) {
    columns[0] = load(reinterpret_cast<const float*>(at));
    columns[1] = load(reinterpret_cast<const float*>(at) + kLanes);
  }
  using Column = f32x16;
  static QUIRE_INLINE void add(Sum& sum, Input input, Column column) { sum += input * column; }
  static constexpr bool kHasTiles = false;
  static constexpr int kRowsTogether = kTileRows;
};

// Rows are converted once, not for each panel.
struct Float16Format : Float32Format {
  static constexpr int kStepBytes = kPanelColumns * 2;
  static QUIRE_INLINE void weights(const char* at, f32x16 (&columns)[2]) {
    columns[0] = load(reinterpret_cast<const fp16*>(at));
    columns[1] = load(reinterpret_cast<const fp16*>(at) + kLanes);
  }
};

struct BFloat16Format {
  using Row = bf16;
  static constexpr DType kRowType = DType::kBFloat16;
  using Sum = f32x16;
  using Input = uint32_t;
  using Column = u32x16;
  static constexpr int kInputs = 2;
  static constexpr int kStepBytes = kPanelColumns * 4;

  static QUIRE_INLINE Input input(const Row* row, int64_t step) { return load_pair(row + 2 * step); }
  static QUIRE_INLINE void weights(const char* at, Column (&columns)[2]) {
    columns[0] = load_bits<Column>(at);
    columns[1] = load_bits<Column>(at + kLine);
  }
  static QUIRE_INLINE void add(Sum& sum, Input input, Column column) { add_pair_products(sum, input, column); }
#if defined(__AMX_BF16__)
  static constexpr bool kHasTiles = true;
  static constexpr int kRowsTogether = kAmxRows;
  using Product = BFloat16Product;
#else
  static constexpr bool kHasTiles = false;
  static constexpr int kRowsTogether = kPairedRows;
#endif
};

#if defined(__aarch64__)
// Adds to each lane the products of its four bytes with those of `inputs`, all with signs.
QUIRE_INLINE void add_byte_products(i32x16& sum, u32x16 bytes, uint32_t inputs) {
  for_each_register(sum, bytes, [b = vreinterpretq_s8_u32(vdupq_n_u32(inputs))](auto& to, const auto& from) {
    const int8x16_t a = bits_as<int8x16_t>(from);
#if defined(__ARM_FEATURE_DOTPROD)
    to = bits_as<Vector<int32_t, 4> >(vdotq_s32(bits_as<int32x4_t>(to), a, b));
#else
    // Inputs are -127 to 127, so that the sum of two products fits into 16 bits.
    const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
    to = bits_as<Vector<int32_t, 4> >(vpadalq_s16(bits_as<int32x4_t>(to), pairs));
#endif
  });
}
#elif !defined(__AVX512VNNI__)
// Of the two 16-bit numbers in each lane.
template <class V>
QUIRE_INLINE V sums_of_products(V a, V b) {
  if constexpr (kIsPair<V>) {
    return {sums_of_products(a.low, b.low), sums_of_products(a.high, b.high)};
  } else {
#if defined(__AVX2__)
    return bits_as<V>(_mm256_madd_epi16(bits_as<__m256i>(a), bits_as<__m256i>(b)));
#elif defined(__SSE2__)
    return bits_as<V>(_mm_madd_epi16(bits_as<__m128i>(a), bits_as<__m128i>(b)));
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
  }
}
#endif

// Inputs are stored with kOffset added, as x86's instruction wants them unsigned; the sum of the column takes that away again.
struct Int8Format {
  using Row = uint8_t;
#if defined(__aarch64__)
  static constexpr int kOffset = 0;
#else
  static constexpr int kOffset = 128;
#endif
  using Sum = i32x16;
  using Input = uint32_t;
  using Column = u32x16;
  static constexpr int kInputs = 4;
  static constexpr int kStepBytes = kPanelColumns * 4;

  static QUIRE_INLINE Input input(const Row* row, int64_t step) {
    Input four;
    std::memcpy(&four, row + 4 * step, sizeof four);
    return four;
  }
  static QUIRE_INLINE void weights(const char* at, Column (&columns)[2]) {
    columns[0] = load_bits<Column>(at);
    columns[1] = load_bits<Column>(at + kLine);
  }
  static QUIRE_INLINE void add(Sum& sum, Input input, Column column) {
#if defined(__AVX512VNNI__)
    sum = bits_as<i32x16>(_mm512_dpbusd_epi32(bits_as<__m512i>(sum), _mm512_set1_epi32(input), bits_as<__m512i>(column)));
#elif defined(__aarch64__)
    add_byte_products(sum, column, input);
#else
    // Bytes as words: first those with even numbers, then those with odd ones.
    const u32x16 inputs = broadcast<u32x16>(input);
    const auto words = bits_as<Vector<int16_t, 2 * kLanes> >(column);
    sum += sums_of_products(bits_as<i32x16>(inputs & 0x00ff00ff), bits_as<i32x16>(words << 8 >> 8));
    sum += sums_of_products(bits_as<i32x16>(inputs >> 8 & 0x00ff00ff), bits_as<i32x16>(words >> 8));
#endif
  }
#if defined(__AMX_INT8__)
  static constexpr bool kHasTiles = true;
  static constexpr int kRowsTogether = kAmxRows;
  using Product = Int8Product;
#else
  static constexpr bool kHasTiles = false;
  static constexpr int kRowsTogether = kPairedRows;
#endif
};

// -- tasks and tiles ----------------------------------------------------------------------------------------------------

// Of rows, so that they stay in the second-level cache from panel to panel, beside the panel and what is written.
inline int64_t max_task_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t cache_bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
  constexpr int64_t cache_bytes = 0;
#endif
  return (cache_bytes > 0 ? cache_bytes : 1 << 20) / 4;
}

struct Split {
  int64_t rows_per_task;
  int64_t num_row_tasks;
};

// A task is a panel and some of the rows: all of them, unless they are so many that a task would be long enough for threads to
// wait for the one that has the last, or do not fit into the cache.
inline Split split_rows(int64_t num_rows, int64_t row_bytes, int64_t num_panels, int num_threads, int rows_together) {
  const int64_t wanted = ceil_div(static_cast<int64_t>(num_threads) * kTasksPerThread, num_panels);
  const int64_t most = max(num_rows / kMinTaskRows, 1);
  const int64_t row_tasks = max(min(wanted, most), ceil_div(num_rows * row_bytes, max_task_bytes()));
  const int64_t rows_per_task = round_up(ceil_div(num_rows, row_tasks), rows_together);
  return {rows_per_task, ceil_div(num_rows, rows_per_task)};
}

// Calls visit(first_row, count, tile, num_tiles) for tiles of nearly equal height, of up to `Rows`.
template <int Rows = kTileRows, class Visit>
QUIRE_INLINE void for_each_tile(int64_t first_row, int64_t last_row, const Visit& visit) {
  const int64_t num_rows = last_row - first_row;
  const int64_t num_tiles = ceil_div(num_rows, Rows);
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t start = first_row + num_rows * tile / num_tiles;
    const int64_t stop = first_row + num_rows * (tile + 1) / num_tiles;
    visit(start, static_cast<int>(stop - start), tile, num_tiles);
  }
}

}  // namespace quire::QUIRE_ISA
