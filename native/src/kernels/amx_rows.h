// Products of up to 32 rows with 32 columns in the tile registers of AMX. Compiled for the instruction set that has them.
#pragma once

#include "amx.h"

namespace quire::QUIRE_ISA {

constexpr int kAmxRows = 2 * kTileLines;  // as many columns
constexpr int kStepsOfTile = kTileLines;
constexpr int kFirstRows = 4, kLastRows = 5, kFirstColumns = 6, kLastColumns = 7;  // registers; 0 to 3 are sums

// The registers of this thread as long as the object lives.
class AmxRegisters {
 public:
  AmxRegisters() = default;
  ~AmxRegisters() {
    if (num_rows_ > 0) release_tiles();
  }
  AmxRegisters(const AmxRegisters&) = delete;
  AmxRegisters& operator=(const AmxRegisters&) = delete;

  // Says how many rows come next, 1 to kAmxRows. What the registers hold is lost.
  void shape(int64_t num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
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

 private:
  int64_t num_rows_ = 0;
};

// In what follows, kIsTall means more than kTileLines rows, and strides are in bytes.

template <bool kIsTall>
QUIRE_INLINE void clear_sums() {
  clear_tile<0>();
  clear_tile<1>();
  if constexpr (kIsTall) {
    clear_tile<2>();
    clear_tile<3>();
  }
}

template <bool kIsTall>
QUIRE_INLINE void load_sums(const void* from, int64_t stride) {
  const char* sums = static_cast<const char*>(from);
  load_tile<0>(sums, stride);
  load_tile<1>(sums + kLine, stride);
  if constexpr (kIsTall) {
    load_tile<2>(sums + kTileLines * stride, stride);
    load_tile<3>(sums + kTileLines * stride + kLine, stride);
  }
}

template <bool kIsTall>
QUIRE_INLINE void store_sums(void* to, int64_t stride) {
  char* sums = static_cast<char*>(to);
  store_tile<0>(sums, stride);
  store_tile<1>(sums + kLine, stride);
  if constexpr (kIsTall) {
    store_tile<2>(sums + kTileLines * stride, stride);
    store_tile<3>(sums + kTileLines * stride + kLine, stride);
  }
}

template <int kTile, bool kArePassing>
QUIRE_INLINE void load_rows(const char* rows, int64_t stride) {
  if constexpr (kArePassing) {
    load_passing_tile<kTile>(rows, stride);
  } else {
    load_tile<kTile>(rows, stride);
  }
}

// Adds kStepsOfTile steps to the sums. A step is four bytes of each row and of each column; columns lie side by side.
// `kArePassing`: the first-level cache had better keep other things than the rows.
template <class Product, bool kIsTall, bool kArePassing = false>
QUIRE_INLINE void add_steps_of_tile(const void* rows, int64_t row_stride, const void* columns, int64_t step_stride) {
  const char* first_rows = static_cast<const char*>(rows);
  const char* first_columns = static_cast<const char*>(columns);
  load_tile<kFirstColumns>(first_columns, step_stride);
  load_tile<kLastColumns>(first_columns + kLine, step_stride);
  load_rows<kFirstRows, kArePassing>(first_rows, row_stride);
  Product::template add<0, kFirstRows, kFirstColumns>();
  Product::template add<1, kFirstRows, kLastColumns>();
  if constexpr (kIsTall) {
    load_rows<kLastRows, kArePassing>(first_rows + kTileLines * row_stride, row_stride);
    Product::template add<2, kLastRows, kFirstColumns>();
    Product::template add<3, kLastRows, kLastColumns>();
  }
}

}  // namespace quire::QUIRE_ISA
