// Products of rows in int8 with weights of 4 bits. See linear.h; compiled once for each instruction set.
#include "group_panels.h"
#include "linear_formats.h"
#include "linear_rows.h"

namespace quire::QUIRE_ISA {
namespace {

// A lane's four bytes hold the weights of eight inputs of a column, in this order: first the lower halves of the bytes, then the
// higher ones. Rows have their inputs in the same order.
constexpr int kOrder[kOctet] = {0, 4, 1, 5, 2, 6, 3, 7};

// -- sums of products of four weights (0 to 15) and four inputs (-127 to 127) in each lane ------------------------------------

#if defined(__AVX512VNNI__)
using Partial = i32x16;
constexpr int64_t kMaxOctets = INT64_MAX;  // that a partial sum has room for
constexpr int kHalvesTogether = 2;         // of a panel, whose sums fit into the registers

QUIRE_INLINE void add_products(Partial& sum, u32x16 weights, uint32_t inputs) {
  sum = bits_as<i32x16>(_mm512_dpbusd_epi32(bits_as<__m512i>(sum), bits_as<__m512i>(weights), _mm512_set1_epi32(inputs)));
}
QUIRE_INLINE i32x16 widened(Partial sum) { return sum; }
#elif defined(__AVX2__)
using Partial = Vector<int16_t, 2 * kLanes>;
constexpr int64_t kMaxOctets = 4;  // 16 x 15 x 127 = 30480
constexpr int kHalvesTogether = 1;

QUIRE_INLINE void add_products(Partial& sum, u32x16 weights, uint32_t inputs) {
  const __m256i all = _mm256_set1_epi32(inputs);
  using Half = decltype(sum.low);
  sum.low += bits_as<Half>(_mm256_maddubs_epi16(bits_as<__m256i>(weights.low), all));
  sum.high += bits_as<Half>(_mm256_maddubs_epi16(bits_as<__m256i>(weights.high), all));
}
QUIRE_INLINE i32x16 widened(Partial sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  using Half = HalfOf<i32x16>;
  return {bits_as<Half>(_mm256_madd_epi16(bits_as<__m256i>(sum.low), ones)),
          bits_as<Half>(_mm256_madd_epi16(bits_as<__m256i>(sum.high), ones))};
}
#else
using Partial = i32x16;
constexpr int64_t kMaxOctets = INT64_MAX;
constexpr int kHalvesTogether = 1;

QUIRE_INLINE void add_products(Partial& sum, u32x16 weights, uint32_t inputs) {
  // Bytes as words: first those with even numbers, then those with odd ones.
  const auto words = bits_as<Vector<int16_t, 2 * kLanes> >(broadcast<u32x16>(inputs));
  sum += sums_of_products(bits_as<i32x16>(weights & 0x00ff00ff), bits_as<i32x16>(words << 8 >> 8));
  sum += sums_of_products(bits_as<i32x16>(weights >> 8 & 0x00ff00ff), bits_as<i32x16>(words >> 8));
}
QUIRE_INLINE i32x16 widened(Partial sum) { return sum; }
#endif

// -- tiles: R rows times one panel --------------------------------------------------------------------------------------

// The rows of a call in int8, the scale of each, and the sums of their groups.
struct Rows {
  const int8_t* numbers;    // [num_rows, row_stride]
  const float* scales;      // [num_rows]
  const float* group_sums;  // [num_rows, num_groups], whole numbers
  int64_t row_stride;
  int64_t num_groups;
};

// Adds the products of a group to `sums`, of some halves of the panel.
template <int R>
QUIRE_INLINE void add_group(i32x16 (&sums)[R][2], const int8_t* inputs, int64_t row_stride, int64_t num_octets,
                            const char* weights, int first_half) {
  for (int64_t octet = 0; octet < num_octets;) {
    const int64_t stop = kMaxOctets < num_octets - octet ? octet + kMaxOctets : num_octets;
    Partial partial[R][kHalvesTogether];
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalvesTogether; ++half) partial[row][half] = Partial{};
    }
    for (; octet < stop; ++octet) {
      u32x16 low[kHalvesTogether], high[kHalvesTogether];
#pragma GCC unroll 2
      for (int half = 0; half < kHalvesTogether; ++half) {
        const char* line = weights + (2 * octet + first_half + half) * kLine;
        __builtin_prefetch(line + kAheadBytes, 0, 2);
        const u32x16 packed = load_bits<u32x16>(line);
        low[half] = packed & 0x0f0f0f0f;
        high[half] = packed >> 4 & 0x0f0f0f0f;
      }
#pragma GCC unroll 12
      for (int row = 0; row < R; ++row) {
        uint32_t eight[2];
        std::memcpy(eight, inputs + row * row_stride + octet * kOctet, sizeof eight);
#pragma GCC unroll 2
        for (int half = 0; half < kHalvesTogether; ++half) {
          add_products(partial[row][half], low[half], eight[0]);
          add_products(partial[row][half], high[half], eight[1]);
        }
      }
    }
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalvesTogether; ++half) sums[row][first_half + half] += widened(partial[row][half]);
    }
  }
}

// Adds R rows times one panel to `totals`, without the scales of the rows. Sums of a group are exact; its scale and zero come in
// once for each row and column.
template <int R>
void multiply_tile(f32x16 (*totals)[2], const Rows& rows, int64_t first_row, const PackedWeight& weight, const char* panel) {
  const int64_t num_octets = weight.group_size / kOctet;
  for (int64_t group = 0; group < rows.num_groups; ++group) {
    const char* weights = panel + kGroupHeader;
    const int8_t* inputs = rows.numbers + first_row * rows.row_stride + group * weight.group_size;
    for (int at = 0; at < kGroupHeader; at += kLine) __builtin_prefetch(panel + kAheadBytes + at, 0, 2);
    i32x16 sums[R][2];
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) sums[row][0] = sums[row][1] = i32x16{};
#pragma GCC unroll 2
    for (int half = 0; half < 2; half += kHalvesTogether) {
      add_group<R>(sums, inputs, rows.row_stride, num_octets, weights, half);
    }
    const float* scales = reinterpret_cast<const float*>(panel);
    const float* zeros = scales + kPanelColumns;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const f32x16 scale = load(scales + half * kLanes), zero = load(zeros + half * kLanes);
#pragma GCC unroll 12
      for (int row = 0; row < R; ++row) {
        const float group_sum = rows.group_sums[(first_row + row) * rows.num_groups + group];
        totals[row][half] += scale * (convert<f32x16>(sums[row][half]) - zero * group_sum);
      }
    }
    panel = weights + num_octets * 2 * kLine;
  }
}

using MultiplyTile = void (*)(f32x16 (*)[2], const Rows&, int64_t, const PackedWeight&, const char*);

template <int R = kTileRows>
MultiplyTile tile_function(int num_rows) {
  if constexpr (R == 1) {
    return multiply_tile<1>;
  } else {
    return num_rows == R ? multiply_tile<R> : tile_function<R - 1>(num_rows);
  }
}

void put_in_order(int8_t* row, int64_t num_inputs) {
  for (int64_t octet = 0; octet < num_inputs; octet += kOctet) {
    int8_t ordered[kOctet];
    for (int i = 0; i < kOctet; ++i) ordered[i] = row[octet + kOrder[i]];
    std::memcpy(row + octet, ordered, kOctet);
  }
}

Rows quantize_rows(const LinearCall& call, ThreadPool& pool) {
  const PackedWeight& weight = *call.weight;
  const LinearScratch scratch(weight, call.num_rows);
  const int64_t num_groups = weight.in_features / weight.group_size;
  int8_t* numbers = reinterpret_cast<int8_t*>(call.scratch + scratch.rows);
  float* scales = reinterpret_cast<float*>(call.scratch + scratch.row_numbers);
  float* group_sums = scales + call.num_rows;
  parallel_for(pool, call.num_rows, [&](int64_t row, int) {
    int8_t* to = numbers + row * scratch.row_bytes;
    scales[row] = quantize_row<0>(call, row, to, weight.in_features);
    for (int64_t group = 0; group < num_groups; ++group) {
      int32_t sum = 0;
      for (int64_t i = 0; i < weight.group_size; ++i) sum += to[group * weight.group_size + i];
      group_sums[row * num_groups + group] = static_cast<float>(sum);
    }
    put_in_order(to, weight.in_features);
  });
  return {numbers, scales, group_sums, scratch.row_bytes, num_groups};
}

}  // namespace

void multiply_groups_int8(const LinearCall& call, ThreadPool& pool) {
  const PackedWeight& weight = *call.weight;
  const Rows rows = quantize_rows(call, pool);
  for_each_task(call, pool, kTileRows, [&](int64_t panel, int64_t first_row, int64_t last_row) {
    const int64_t column = panel * kPanelColumns;
    const int64_t count = min(weight.out_features - column, kPanelColumns);
    f32x16 bias[2];
    load_bias(call.bias, column, count, bias);
    for_each_tile(first_row, last_row, [&](int64_t row, int num_rows, int64_t, int64_t) {
      f32x16 totals[kTileRows][2] = {};
      tile_function<>(num_rows)(totals, rows, row, weight, weight.panels + panel * weight.panel_bytes());
      for (int i = 0; i < num_rows; ++i) {
        for (int half = 0; half < 2; ++half) totals[i][half] = totals[i][half] * rows.scales[row + i] + bias[half];
        store_row(call, row + i, column, count, totals[i]);
      }
    });
  });
}

}  // namespace quire::QUIRE_ISA
