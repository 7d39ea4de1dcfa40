// Rows in pairs times a panel, by the instructions of ARM that multiply two rows with two columns. They add the products of one
// step after those of the other, as the instructions for one row do, so that a row has the same bits alone and in a pair.
#pragma once

#include "linear_formats.h"

namespace quire::QUIRE_ISA {

// Adds the products of two rows and two columns, of which each has eight bytes, to their four sums.
QUIRE_INLINE void add_block(Vector<float, 4>& sums, uint32x4_t rows, uint32x4_t columns) {
  sums = bits_as<Vector<float, 4> >(
      vbfmmlaq_f32(bits_as<float32x4_t>(sums), vreinterpretq_bf16_u32(rows), vreinterpretq_bf16_u32(columns)));
}
QUIRE_INLINE void add_block(Vector<int32_t, 4>& sums, uint32x4_t rows, uint32x4_t columns) {
  sums = bits_as<Vector<int32_t, 4> >(
      vmmlaq_s32(bits_as<int32x4_t>(sums), vreinterpretq_s8_u32(rows), vreinterpretq_s8_u32(columns)));
}

// As multiply_tile, for an even number of steps. The last row is a pair with itself if the number of rows is odd.
template <class Format, int R, int kLines>
void multiply_row_pairs(typename Format::Sum* sums_out, const typename Format::Row* rows, int64_t row_stride, int64_t num_steps,
                        const char* panel, const char* ahead) {
  using Block = HalfOf<HalfOf<typename Format::Sum> >;
  constexpr int kPairs = (R + 1) / 2;
  constexpr int kQuarter = kLine / 4;
#pragma GCC unroll 1
  for (int half = 0; half < 2; ++half) {
    Block blocks[kPairs][8];
#pragma GCC unroll 24
    for (int i = 0; i < kPairs * 8; ++i) blocks[i / 8][i % 8] = Block{};
    for (int64_t step = 0; step < num_steps; step += 2) {
      const char* columns = panel + step * Format::kStepBytes + half * kLine;
#pragma GCC unroll 2
      for (int line = 0; line < kLines; ++line) __builtin_prefetch(ahead + ((step + half) * kLines + line) * kLine, 0, 2);
      uint32x4_t inputs[kPairs];
#pragma GCC unroll 3
      for (int pair = 0; pair < kPairs; ++pair) {
        const auto* first = rows + 2 * pair * row_stride + step * Format::kInputs;
        const auto* second = 2 * pair + 1 < R ? first + row_stride : first;
        inputs[pair] = vcombine_u32(load_bits<uint32x2_t>(first), load_bits<uint32x2_t>(second));
      }
#pragma GCC unroll 4
      for (int quarter = 0; quarter < 4; ++quarter) {
        const uint32x4_t now = load_bits<uint32x4_t>(columns + quarter * kQuarter);
        const uint32x4_t next = load_bits<uint32x4_t>(columns + Format::kStepBytes + quarter * kQuarter);
#pragma GCC unroll 3
        for (int pair = 0; pair < kPairs; ++pair) {
          add_block(blocks[pair][2 * quarter], inputs[pair], vzip1q_u32(now, next));
          add_block(blocks[pair][2 * quarter + 1], inputs[pair], vzip2q_u32(now, next));
        }
      }
    }
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row) {
      Block quarters[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const auto a = bits_as<uint64x2_t>(blocks[row / 2][2 * i]), b = bits_as<uint64x2_t>(blocks[row / 2][2 * i + 1]);
        quarters[i] = bits_as<Block>(row % 2 == 0 ? vzip1q_u64(a, b) : vzip2q_u64(a, b));
      }
      sums_out[2 * row + half] = {{quarters[0], quarters[1]}, {quarters[2], quarters[3]}};
    }
  }
}

}  // namespace quire::QUIRE_ISA
