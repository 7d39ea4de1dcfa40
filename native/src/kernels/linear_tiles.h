// Rows times a panel of a weight that has no groups.
#pragma once

#include "linear_formats.h"
#if defined(__AMX_BF16__)
#include "linear_amx.h"
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "linear_row_pairs.h"
#endif

namespace quire::QUIRE_ISA {

// Adds `num_steps` steps to the sums. `ahead`: memory that will be needed next, of which each step fetches kLines lines.
template <class Format, int R, int kLines>
QUIRE_INLINE void add_steps(typename Format::Sum (&sums)[R][2], const typename Format::Row* rows, int64_t row_stride,
                            int64_t num_steps, const char* panel, const char* ahead) {
  for (int64_t step = 0; step < num_steps; ++step) {
    typename Format::Column columns[2];
    Format::weights(panel + step * Format::kStepBytes, columns);
#pragma GCC unroll 2
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(ahead + (step * kLines + line) * kLine, 0, 2);
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) {
      const auto input = Format::input(rows + row * row_stride, step);
      Format::add(sums[row][0], input, columns[0]);
      Format::add(sums[row][1], input, columns[1]);
    }
  }
}

template <class Format, int R, int kLines>
void multiply_tile(typename Format::Sum* sums_out, const typename Format::Row* rows, int64_t row_stride, int64_t num_steps,
                   const char* panel, const char* ahead) {
  typename Format::Sum sums[R][2];
#pragma GCC unroll 12
  for (int row = 0; row < R; ++row) sums[row][0] = sums[row][1] = typename Format::Sum{};
  add_steps<Format, R, kLines>(sums, rows, row_stride, num_steps, panel, ahead);
#pragma GCC unroll 12
  for (int row = 0; row < R; ++row) {
    sums_out[2 * row] = sums[row][0];
    sums_out[2 * row + 1] = sums[row][1];
  }
}

template <class Format>
using MultiplyTile = void (*)(typename Format::Sum*, const typename Format::Row*, int64_t, int64_t, const char*, const char*);

// Rows that have their sums in vector registers together.
template <class Format>
constexpr int kVectorRows = Format::kHasTiles ? kTileRows : Format::kRowsTogether;

template <class Format, int kLines, int R = kVectorRows<Format> >
MultiplyTile<Format> tile_function(int num_rows, int64_t num_steps) {
  if constexpr (R == 1) {
    return multiply_tile<Format, 1, kLines>;
  } else {
    if (num_rows < R) return tile_function<Format, kLines, R - 1>(num_rows, num_steps);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (Format::kRowsTogether == kPairedRows) {
      if (num_steps % 2 == 0) return multiply_row_pairs<Format, R, kLines>;
    }
#endif
    return multiply_tile<Format, R, kLines>;
  }
}

// One panel times rows first_row to last_row; finish(row, sums) takes the 32 sums of a row.
template <class Format, class Finish>
QUIRE_INLINE void multiply_panel(const typename Format::Row* rows, int64_t row_stride, int64_t first_row, int64_t last_row,
                                 int64_t num_steps, const char* panel, int64_t panel_bytes, const Finish& finish) {
#if defined(__AMX_BF16__)
  if constexpr (Format::kHasTiles) {
    return multiply_amx_panel<Format>(rows, row_stride, first_row, last_row, num_steps, panel, panel_bytes, finish);
  }
#endif
  const char* next = panel + panel_bytes;
  const int64_t half = num_steps * kLine;  // bytes of the next panel that a pass with one line for each step fetches
  for_each_tile<kVectorRows<Format> >(first_row, last_row, [&](int64_t row, int count, int64_t tile, int64_t num_tiles) {
    typename Format::Sum sums[kVectorRows<Format>][2];
    const auto multiply = num_tiles == 1 ? tile_function<Format, 2>(count, num_steps)
                          : tile < 2     ? tile_function<Format, 1>(count, num_steps)
                                         : tile_function<Format, 0>(count, num_steps);
    multiply(&sums[0][0], rows + row * row_stride, row_stride, num_steps, panel, tile == 1 ? next + half : next);
    for (int i = 0; i < count; ++i) finish(row + i, sums[i]);
  });
}

// What turns the sums of products with an int8 panel into numbers.
struct Int8Columns {
  f32x16 scale[2];
  i32x16 sum[2];

  explicit QUIRE_INLINE Int8Columns(const char* tail) {
    for (int half = 0; half < 2; ++half) {
      scale[half] = load_bits<f32x16>(tail + half * kLine);
      sum[half] = load_bits<i32x16>(tail + kPanelColumns * 4 + half * kLine);
    }
  }
  QUIRE_INLINE f32x16 numbers(int half, i32x16 sums, float row_scale) const {
    return convert<f32x16>(sums - sum[half] * Int8Format::kOffset) * (scale[half] * row_scale);
  }
};

}  // namespace quire::QUIRE_ISA
