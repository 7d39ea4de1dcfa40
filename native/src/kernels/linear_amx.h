// A panel times rows in the tile registers of AMX. A panel's steps are laid out as the instructions want the columns: sixteen of
// them, of 16 columns each, are a tile.
#pragma once

#include "amx.h"
#include "linear_formats.h"

namespace quire::QUIRE_ISA {

constexpr int kAmxRows = 2 * kTileLines;  // computed together: two tiles of rows times the two of a panel's columns
constexpr int64_t kStepsOfTile = kTileLines;
constexpr int64_t kPanelTileLines = 2 * kTileLines;
constexpr int kFirstRows = 4, kLastRows = 5, kFirstColumns = 6, kLastColumns = 7;  // registers; 0 to 3 are sums

// Says how many of the rows that are computed together there are.
inline void shape_amx_rows(int64_t num_rows) {
  const int64_t first = min(num_rows, kTileLines), last = num_rows - first;
  TileShapes shapes;
  shapes.set(0, first);
  shapes.set(1, first);
  shapes.set(kFirstRows, first);
  if (last > 0) {
    shapes.set(2, last);
    shapes.set(3, last);
    shapes.set(kLastRows, last);
  }
  shapes.set(kFirstColumns, kTileLines);
  shapes.set(kLastColumns, kTileLines);
  shape_tiles(shapes);
}

// Adds kStepsOfTile steps to the sums.
template <class Format, bool kIsTall>
QUIRE_INLINE void add_tiles(const char* rows, int64_t row_bytes, const char* columns) {
  load_tile<kFirstColumns>(columns, Format::kStepBytes);
  load_tile<kLastColumns>(columns + kLine, Format::kStepBytes);
  load_tile<kFirstRows>(rows, row_bytes);
  Format::template add_tile_products<0, kFirstRows, kFirstColumns>();
  Format::template add_tile_products<1, kFirstRows, kLastColumns>();
  if constexpr (kIsTall) {
    load_tile<kLastRows>(rows + kTileLines * row_bytes, row_bytes);
    Format::template add_tile_products<2, kLastRows, kFirstColumns>();
    Format::template add_tile_products<3, kLastRows, kLastColumns>();
  }
}

// `ahead`: memory that will be needed next, of which each tile fetches `num_ahead` lines.
template <class Format, bool kIsTall>
void multiply_amx_rows(typename Format::Sum (&sums)[kAmxRows][2], const char* rows, int64_t row_bytes, int64_t num_steps,
                       const char* panel, const char* ahead, int64_t num_ahead) {
  clear_tile<0>();
  clear_tile<1>();
  if constexpr (kIsTall) {
    clear_tile<2>();
    clear_tile<3>();
  }
  int64_t step = 0;
  for (; step + kStepsOfTile <= num_steps; step += kStepsOfTile) {
    for (int64_t line = 0; line < num_ahead; ++line) {
      __builtin_prefetch(ahead + step * Format::kStepBytes + line * kLine, 0, 2);
    }
    add_tiles<Format, kIsTall>(rows + step * 4, row_bytes, panel + step * Format::kStepBytes);
  }
  if (step < num_steps) {
    alignas(kLine) char rest[kStepsOfTile * Format::kStepBytes] = {};
    std::memcpy(rest, panel + step * Format::kStepBytes, (num_steps - step) * Format::kStepBytes);
    add_tiles<Format, kIsTall>(rows + step * 4, row_bytes, rest);
  }
  store_tile<0>(&sums[0][0], sizeof sums[0]);
  store_tile<1>(&sums[0][1], sizeof sums[0]);
  if constexpr (kIsTall) {
    store_tile<2>(&sums[kTileLines][0], sizeof sums[0]);
    store_tile<3>(&sums[kTileLines][1], sizeof sums[0]);
  }
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
  int64_t shaped = 0;
  for (int64_t row = first_row; row < last_row; row += kAmxRows, ahead += num_ahead * kLine) {
    const int64_t count = min(last_row - row, kAmxRows);
    if (count != shaped) {
      shape_amx_rows(count);
      shaped = count;
    }
    const char* start = reinterpret_cast<const char*>(rows) + row * row_bytes;
    if (count > kTileLines) {
      multiply_amx_rows<Format, true>(sums, start, row_bytes, num_steps, panel, ahead, num_ahead);
    } else {
      multiply_amx_rows<Format, false>(sums, start, row_bytes, num_steps, panel, ahead, num_ahead);
    }
    for (int64_t i = 0; i < count; ++i) finish(row + i, sums[i]);
  }
  release_tiles();
}

}  // namespace quire::QUIRE_ISA
