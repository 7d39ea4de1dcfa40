// Products of rows in bf16 with weights in groups. See linear.h; compiled once for each instruction set.
#include "group_panels.h"
#include "linear_formats.h"
#include "linear_rows.h"

namespace quire::QUIRE_ISA {
namespace {

// Lines hold the weights of some inputs of sixteen columns; each becomes pairs of bf16.

QUIRE_INLINE u32x16 bits_of_whole(u32x16 numbers) { return bits_as<u32x16>(convert<f32x16>(bits_as<i32x16>(numbers))); }

// Four bytes of each lane: two pairs.
QUIRE_INLINE void unpack_bytes(u32x16 packed, u32x16* pairs) {
  for (int pair = 0; pair < 2; ++pair) {
    const u32x16 word = packed >> (16 * pair);
    pairs[pair] = bits_of_whole(word & 0xff) >> 16 | bits_of_whole(word >> 8 & 0xff);
  }
}

struct Int8Lines {
  using Group = WholeGroup;
  static constexpr int kLines = 1;  // of a panel, that are read together
  static constexpr int kPairs = 2;

  static QUIRE_INLINE void unpack(const char* at, u32x16 (&pairs)[kPairs]) { unpack_bytes(load_bits<u32x16>(at), pairs); }
};

struct Int6Lines {
  using Group = Int6Group;
  static constexpr int kLines = 3;
  static constexpr int kPairs = 8;

  static QUIRE_INLINE void unpack(const char* at, u32x16 (&pairs)[kPairs]) {
    u32x16 fours[4];
    unpack_int6(at, fours);
    for (int i = 0; i < 4; ++i) unpack_bytes(fours[i], pairs + 2 * i);
  }
};

#if defined(__AVX512BW__)
// The numbers 0 to 15 as bf16, twice: the instruction picks by 5 bits, of which the highest is another weight's.
alignas(64) const uint16_t kNumbers[32] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
                                           0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                                           0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

alignas(64) const uint16_t kFloat4Pairs[32] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                               0x0000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
                                               0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                               0x0000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

template <class GroupOfLines, const uint16_t* kTable>
struct TableLines {
  using Group = GroupOfLines;
  static constexpr int kLines = 1;
  static constexpr int kPairs = 4;

  static QUIRE_INLINE void unpack(const char* at, u32x16 (&pairs)[kPairs]) {
    const __m512i numbers = _mm512_load_si512(kTable);
    const __m512i words = _mm512_loadu_si512(at);
    pairs[0] = bits_as<u32x16>(_mm512_permutexvar_epi16(words, numbers));
    pairs[1] = bits_as<u32x16>(_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), numbers));
    pairs[2] = bits_as<u32x16>(_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), numbers));
    pairs[3] = bits_as<u32x16>(_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), numbers));
  }
};
using Int4Lines = TableLines<WholeGroup, kNumbers>;
using Float4Lines = TableLines<Float4Group<0, 1>, kFloat4Pairs>;
#else
struct Int4Lines {
  using Group = WholeGroup;
  static constexpr int kLines = 1;
  static constexpr int kPairs = 4;

  static QUIRE_INLINE void unpack(const char* at, u32x16 (&pairs)[kPairs]) {
    const u32x16 packed = load_bits<u32x16>(at);
    for (int pair = 0; pair < kPairs; ++pair) {
      pairs[pair] = bits_of_whole(packed >> (4 * pair) & 0xf) >> 16 | bits_of_whole(packed >> (16 + 4 * pair) & 0xf);
    }
  }
};

struct Float4Lines {
  using Group = Float4Group<0, 2>;
  static constexpr int kLines = 1;
  static constexpr int kPairs = 4;

  static QUIRE_INLINE void unpack(const char* at, u32x16 (&pairs)[kPairs]) {
    const u32x16 packed = load_bits<u32x16>(at);
    for (int pair = 0; pair < kPairs; ++pair) {
      const u32x16 numbers = float4_numbers(packed >> (4 * pair) & 0x000f000f);
      pairs[pair] = bits_of_whole((numbers & 0xff) - kFloat4Zero) >> 16 | bits_of_whole((numbers >> 16 & 0xff) - kFloat4Zero);
    }
  }
};
#endif

// The rows of a call as bf16, and the sum of each row's groups.
struct Rows {
  const bf16* numbers;      // [num_rows, in_features]
  const float* group_sums;  // [num_rows, num_groups]
  int64_t in_features;
  int64_t num_groups;
};

// R rows times one panel, added to `totals`, without the units. A group's weights are multiplied as whole numbers, which bf16 holds
// exactly; its scale and zero come in once for each row and column.
template <class Lines, int R>
void multiply_tile(f32x16 (*totals)[2], const Rows& rows, int64_t first_row, const PackedWeight& weight, const char* panel) {
  const int64_t num_lines = weight.group_size / (2 * Lines::kPairs);
  for (int64_t group = 0; group < rows.num_groups; ++group) {
    const typename Lines::Group parts(weight, panel, group);
    parts.prefetch_scales();
    const bf16* inputs = rows.numbers + first_row * rows.in_features + group * weight.group_size;
    f32x16 sums[R][2];
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) sums[row][0] = sums[row][1] = f32x16{};
    for (int64_t line = 0; line < num_lines; ++line) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const char* at = parts.weights + (2 * line + half) * Lines::kLines * kLine;
#pragma GCC unroll 3
        for (int i = 0; i < Lines::kLines; ++i) __builtin_prefetch(at + kAheadBytes + i * kLine, 0, 2);
        u32x16 pairs[Lines::kPairs];
        Lines::unpack(at, pairs);
#pragma GCC unroll 12
        for (int row = 0; row < R; ++row) {
#pragma GCC unroll 8
          for (int pair = 0; pair < Lines::kPairs; ++pair) {
            const uint32_t input = BFloat16Format::input(inputs + row * rows.in_features, Lines::kPairs * line + pair);
            BFloat16Format::add(sums[row][half], input, pairs[pair]);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const f32x16 scale = parts.scale(half), zero = parts.zero(half);
#pragma GCC unroll 12
      for (int row = 0; row < R; ++row) {
        totals[row][half] += scale * (sums[row][half] - zero * rows.group_sums[(first_row + row) * rows.num_groups + group]);
      }
    }
  }
}

using MultiplyTile = void (*)(f32x16 (*)[2], const Rows&, int64_t, const PackedWeight&, const char*);

template <class Lines, int R = kTileRows>
MultiplyTile tile_function(int num_rows) {
  if constexpr (R == 1) {
    return multiply_tile<Lines, 1>;
  } else {
    return num_rows == R ? multiply_tile<Lines, R> : tile_function<Lines, R - 1>(num_rows);
  }
}

Rows convert_rows(const LinearCall& call, ThreadPool& pool) {
  const PackedWeight& weight = *call.weight;
  const LinearScratch scratch(weight, call.num_rows);
  const int64_t num_groups = weight.num_groups();
  bf16* converted = reinterpret_cast<bf16*>(call.scratch + scratch.rows);
  float* group_sums = reinterpret_cast<float*>(call.scratch + scratch.row_numbers);
  const auto prepare = [&](int64_t from, int64_t row) {
    bf16* to = converted + row * weight.in_features;
    convert_row(call, from, to, weight.in_features);
    for (int64_t group = 0; group < num_groups; ++group) {
      f32x16 sum = {};
      for (int64_t i = 0; i < weight.group_size; i += kLanes) sum += load(to + group * weight.group_size + i);
      group_sums[row * num_groups + group] = sum_of_lanes(sum);
    }
  };
  prepare_rows(call, pool, prepare, [&](int64_t row, int64_t other) {
    std::memcpy(converted + other * weight.in_features, converted + row * weight.in_features, weight.in_features * sizeof(bf16));
    std::memcpy(group_sums + other * num_groups, group_sums + row * num_groups, num_groups * sizeof(float));
  });
  return {converted, group_sums, weight.in_features, num_groups};
}

template <class Lines>
void multiply(const LinearCall& call, ThreadPool& pool) {
  const PackedWeight& weight = *call.weight;
  const Rows rows = convert_rows(call, pool);
  for_each_task(call, pool, kTileRows, [&](const PanelTask& task) {
    for_each_tile(task.first_row, task.last_row, [&](int64_t row, int num_rows, int64_t, int64_t) {
      f32x16 totals[kTileRows][2] = {};
      tile_function<Lines>(num_rows)(totals, rows, row, weight, task.panel);
      for (int i = 0; i < num_rows; ++i) {
        for (int half = 0; half < 2; ++half)
          totals[i][half] = totals[i][half] * Lines::Group::unit(weight, task.panel, half) + task.bias[half];
        store_row(call, row + i, task, totals[i]);
      }
    });
  });
}

}  // namespace

void multiply_groups(const LinearCall& call, ThreadPool& pool) {
  switch (call.weight->format) {
    case WeightFormat::kInt4: return multiply<Int4Lines>(call, pool);
    case WeightFormat::kMxfp4: return multiply<Float4Lines>(call, pool);
    case WeightFormat::kInt6: return multiply<Int6Lines>(call, pool);
    default: return multiply<Int8Lines>(call, pool);
  }
}

}  // namespace quire::QUIRE_ISA
