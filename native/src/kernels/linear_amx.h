// A panel times rows in the tile registers of AMX, for which a panel's columns are laid out already.
#pragma once

#include "amx_rows.h"
#include "linear_formats.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kPanelTileLines = 2 * kTileLines;
constexpr int64_t kBlockSteps = 16 * kStepsOfTile;     // of a panel: 32 KB, which stay in the first-level cache from rows to rows
constexpr int64_t kChunkRows = 8 * kAmxRows;           // whose sums are kept in memory from block to block
constexpr int64_t kMaxBlockedSteps = 4 * kBlockSteps;  // longer rows may not be in the second-level cache: read them in one go

// Some steps of a panel. `ahead`: memory that will be needed next, of which each tile fetches `num_ahead` lines.
struct PanelBlock {
  const char* columns;
  int64_t num_steps;
  bool is_first;
  const char* ahead;
  int64_t num_ahead;
};

// Adds the products of a block to the sums; those of the first block are zero.
template <class Format, bool kIsTall, bool kArePassing>
void add_amx_block(typename Format::Sum (*sums)[2], const char* rows, int64_t row_bytes, PanelBlock block) {
  using Product = typename Format::Product;
  if (block.is_first) {
    clear_sums<kIsTall>();
  } else {
    load_sums<kIsTall>(sums, sizeof sums[0]);
  }
  int64_t step = 0;
  for (; step + kStepsOfTile <= block.num_steps; step += kStepsOfTile) {
    const int64_t place = step * Format::kStepBytes;
    for (int64_t line = 0; line < block.num_ahead; ++line) __builtin_prefetch(block.ahead + place + line * kLine, 0, 2);
    add_steps_of_tile<Product, kIsTall, kArePassing>(rows + step * 4, row_bytes, block.columns + place, Format::kStepBytes);
  }
  if (step < block.num_steps) {
    alignas(kLine) char rest[kStepsOfTile * Format::kStepBytes] = {};
    std::memcpy(rest, block.columns + step * Format::kStepBytes, (block.num_steps - step) * Format::kStepBytes);
    add_steps_of_tile<Product, kIsTall, kArePassing>(rows + step * 4, row_bytes, rest, Format::kStepBytes);
  }
  store_sums<kIsTall>(sums, sizeof sums[0]);
}

// As multiply_panel. Rows are followed by zeros up to a whole number of cache lines.
template <class Format, class Finish>
QUIRE_INLINE void multiply_amx_panel(const typename Format::Row* rows, int64_t row_stride, int64_t first_row, int64_t last_row,
                                     int64_t num_steps, const char* panel, int64_t panel_bytes, const Finish& finish) {
  const int64_t row_bytes = row_stride * sizeof(typename Format::Row);
  alignas(kLine) typename Format::Sum sums[kChunkRows][2];
  // Every pass over the panel fetches some lines of each of the next one's tiles.
  const int64_t num_ahead = ceil_div(kPanelTileLines, ceil_div(last_row - first_row, kAmxRows));
  const bool is_blocked = last_row - first_row > kAmxRows && num_steps <= kMaxBlockedSteps;
  const int64_t block_steps = is_blocked ? kBlockSteps : num_steps;
  AmxRegisters registers;
  for (int64_t chunk = first_row; chunk < last_row; chunk += kChunkRows) {
    for (int64_t step = 0; step < num_steps; step += block_steps) {
      const int64_t place = step * Format::kStepBytes;
      PanelBlock block{panel + place, min(block_steps, num_steps - step), step == 0, nullptr, num_ahead};
      for (int64_t row = chunk; row < min(chunk + kChunkRows, last_row); row += kAmxRows) {
        const int64_t count = min(last_row - row, kAmxRows);
        registers.shape(count);
        const char* start = reinterpret_cast<const char*>(rows) + row * row_bytes + step * 4;
        auto* sums_of_rows = is_blocked ? sums + (row - chunk) : sums;
        block.ahead = panel + panel_bytes + place + (row - first_row) / kAmxRows * num_ahead * kLine;
        const auto add = count <= kTileLines ? add_amx_block<Format, false, false>
                         : is_blocked        ? add_amx_block<Format, true, true>
                                             : add_amx_block<Format, true, false>;
        add(sums_of_rows, start, row_bytes, block);
        if (step + block_steps < num_steps) continue;
        for (int64_t i = 0; i < count; ++i) finish(row + i, sums_of_rows[i]);
      }
    }
  }
}

}  // namespace quire::QUIRE_ISA
