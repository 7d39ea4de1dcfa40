// The tile registers of AMX: eight matrices of up to sixteen rows of a cache line each, and their products. Compiled for the
// instruction set that has them.
#pragma once

#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr int kTileLines = 16;  // rows of a tile at most

// The layout that LDTILECFG reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t first_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};

  void set(int tile, int64_t rows) {
    row_bytes[tile] = kLine;
    num_rows[tile] = static_cast<uint8_t>(rows);
  }
};

// Instructions name their registers, hence the templates. The compiler's own functions do not say that they read memory.
QUIRE_INLINE void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
QUIRE_INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
QUIRE_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
QUIRE_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

// Of lines that the first-level cache had better not keep.
template <int kTile>
QUIRE_INLINE void load_passing_tile(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
QUIRE_INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

// Adds products of pairs of bf16 to float32 sums. For each sum, those of the even and those of the odd inputs are added up by
// themselves, in rising order, then both, then to the sum; denormal numbers count as zero.
struct BFloat16Product {
  template <int kSums, int kRows, int kColumns>
  static QUIRE_INLINE void add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kColumns));
  }
};

// Adds products of uint8 rows and int8 columns, four inputs in a step, to int32 sums.
struct Int8Product {
  template <int kSums, int kRows, int kColumns>
  static QUIRE_INLINE void add() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kColumns));
  }
};

}  // namespace quire::QUIRE_ISA
