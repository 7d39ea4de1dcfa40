// A panel times rows in the tile registers of AMX, for which a panel's columns are laid out already.
#pragma once

#include "amx_rows.h"
#include "linear_formats.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kPanelTileLines = 2 * kTileLines;

// `ahead`: memory that will be needed next, of which each tile fetches `num_ahead` lines.
template <class Format, bool kIsTall>
void multiply_amx_rows(typename Format::Sum (&sums)[kAmxRows][2], const char* rows, int64_t row_bytes, int64_t num_steps,
                       const char* panel, const char* ahead, int64_t num_ahead) {
  using Product = typename Format::Product;
  clear_sums<kIsTall>();
  int64_t step = 0;
  for (; step + kStepsOfTile <= num_steps; step += kStepsOfTile) {
    for (int64_t line = 0; line < num_ahead; ++line) {
      __builtin_prefetch(ahead + step * Format::kStepBytes + line * kLine, 0, 2);
    }
    add_steps_of_tile<Product, kIsTall>(rows + step * 4, row_bytes, panel + step * Format::kStepBytes, Format::kStepBytes);
  }
  if (step < num_steps) {
    alignas(kLine) char rest[kStepsOfTile * Format::kStepBytes] = {};
    std::memcpy(rest, panel + step * Format::kStepBytes, (num_steps - step) * Format::kStepBytes);
    add_steps_of_tile<Product, kIsTall>(rows + step * 4, row_bytes, rest, Format::kStepBytes);
  }
  store_sums<kIsTall>(sums, sizeof sums[0]);
}

// As multiply_panel. Rows are followed by zeros up to a whole number of cache lines.
template <class Format, class Finish>
QUIRE_INLINE void multiply_amx_panel(const typename Format::Row* rows, int64_t row_stride, int64_t first_row, int64_t last_row,
                                     int64_t num_steps, const char* panel, int64_t panel_bytes, const Finish& finish) {
  const int64_t row_bytes = row_stride * sizeof(typename Format::Row);
  alignas(kLine) typename Format::Sum sums[kAmxRows][2];
  // Every pass over the panel fetches some lines of each of the next one's tiles.
  const int64_t num_ahead = ceil_div(kPanelTileLines, ceil_div(last_row - first_row, kAmxRows));
  const char* ahead = panel + panel_bytes;
  AmxRegisters registers;
  for (int64_t row = first_row; row < last_row; row += kAmxRows, ahead += num_ahead * kLine) {
    const int64_t count = min(last_row - row, kAmxRows);
    registers.shape(count);
    const char* start = reinterpret_cast<const char*>(rows) + row * row_bytes;
    if (count > kTileLines) {
      multiply_amx_rows<Format, true>(sums, start, row_bytes, num_steps, panel, ahead, num_ahead);
    } else {
      multiply_amx_rows<Format, false>(sums, start, row_bytes, num_steps, panel, ahead, num_ahead);
    }
    for (int64_t i = 0; i < count; ++i) finish(row + i, sums[i]);
  }
}

}  // namespace quire::QUIRE_ISA
