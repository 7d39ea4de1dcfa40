// Products of rows in int8 with weights in groups. See linear.h; compiled once for each instruction set.
#include "group_panels.h"
#include "linear_formats.h"
#include "linear_rows.h"

namespace quire::QUIRE_ISA {
namespace {

// -- sums of products of four weights and four inputs (-127 to 127) in each lane ---------------------------------------------

#if defined(__AVX512VNNI__)
using Partial = i32x16;
constexpr int64_t kMaxSum = INT64_MAX;  // that a partial sum has room for
constexpr int kHalvesTogether = 2;      // of a panel, whose sums fit into the registers with those of kRowsTogether rows
constexpr int kRowsTogether = 8;        // and with what they add up to

QUIRE_INLINE void add_products(Partial& sum, u32x16 weights, uint32_t inputs) {
  sum = bits_as<i32x16>(_mm512_dpbusd_epi32(bits_as<__m512i>(sum), bits_as<__m512i>(weights), _mm512_set1_epi32(inputs)));
}
QUIRE_INLINE i32x16 widened(Partial sum) { return sum; }
#elif defined(__AVX2__)
using Partial = Vector<int16_t, 2 * kLanes>;
constexpr int64_t kMaxSum = INT16_MAX;
constexpr int kHalvesTogether = 1;
constexpr int kRowsTogether = 2 * kTileRows;

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
constexpr int64_t kMaxSum = INT64_MAX;
constexpr int kHalvesTogether = 1;
constexpr int kRowsTogether = kTileRows;

QUIRE_INLINE void add_products(Partial& sum, u32x16 weights, uint32_t inputs) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  for_each_register(sum, weights, [b = vreinterpretq_s8_u32(vdupq_n_u32(inputs))](auto& to, const auto& from) {
    to = bits_as<Vector<int32_t, 4> >(vusdotq_s32(bits_as<int32x4_t>(to), bits_as<uint8x16_t>(from), b));
  });
#elif defined(__aarch64__)
  add_byte_products(sum, weights, inputs);
#else
  // Bytes as words: first those with even numbers, then those with odd ones.
  const auto words = bits_as<Vector<int16_t, 2 * kLanes> >(broadcast<u32x16>(inputs));
  sum += sums_of_products(bits_as<i32x16>(weights & 0x00ff00ff), bits_as<i32x16>(words << 8 >> 8));
  sum += sums_of_products(bits_as<i32x16>(weights >> 8 & 0x00ff00ff), bits_as<i32x16>(words >> 8));
#endif
}
QUIRE_INLINE i32x16 widened(Partial sum) { return sum; }
#endif

// -- lines: weights of some inputs of sixteen columns, and the operands that they are multiplied as ---------------------------

QUIRE_INLINE void unpack(u32x16 line, u32x16 (&halves)[2]) {
  halves[0] = line & 0x0f0f0f0f;
  halves[1] = line >> 4 & 0x0f0f0f0f;
}

// Four bytes hold the weights of eight inputs: first the lower halves of the bytes, then the higher ones.
struct Int4Lines {
  using Group = WholeGroup;
  static constexpr int kLines = 1;  // of a panel, that are read together
  static constexpr int kMaxWeight = 15;
  static constexpr int kInputs = 8;
  static constexpr int kOrder[kInputs] = {0, 4, 1, 5, 2, 6, 3, 7};  // of the inputs of a row, to fit
  static constexpr int kOperands = 2;
  static constexpr int kPartials = 1;

  static QUIRE_INLINE void operands(const char* at, u32x16 (&operands)[kOperands]) { unpack(load_bits<u32x16>(at), operands); }
  static QUIRE_INLINE i32x16 sum(const Partial (&partials)[kPartials]) { return widened(partials[0]); }
};

struct Float4Lines : Int4Lines {
  using Group = Float4Group<kFloat4Zero, 2>;
  static constexpr int kMaxWeight = 2 * kFloat4Zero;

  static QUIRE_INLINE void operands(const char* at, u32x16 (&operands)[kOperands]) {
    unpack(load_bits<u32x16>(at), operands);
    for (u32x16& operand : operands) operand = float4_numbers(operand);
  }
};

struct Int8Lines {
  using Group = WholeGroup;
  static constexpr int kLines = 1;
  static constexpr int kMaxWeight = 15;  // where bytes are multiplied by halves
  static constexpr int kInputs = 4;
  static constexpr int kOrder[kInputs] = {0, 1, 2, 3};
#if (defined(__AVX2__) && !defined(__AVX512VNNI__)) || (defined(__aarch64__) && !defined(__ARM_FEATURE_MATMUL_INT8))
  // Products of whole bytes would not fit into 16 bits, or the instruction takes the highest bit for a sign.
  static constexpr int kOperands = 2;
  static constexpr int kPartials = 2;

  static QUIRE_INLINE void operands(const char* at, u32x16 (&operands)[kOperands]) { unpack(load_bits<u32x16>(at), operands); }
  static QUIRE_INLINE i32x16 sum(const Partial (&partials)[kPartials]) {
    return widened(partials[0]) + (widened(partials[1]) << 4);
  }
#else
  static constexpr int kOperands = 1;
  static constexpr int kPartials = 1;

  static QUIRE_INLINE void operands(const char* at, u32x16 (&operands)[kOperands]) { operands[0] = load_bits<u32x16>(at); }
  static QUIRE_INLINE i32x16 sum(const Partial (&partials)[kPartials]) { return widened(partials[0]); }
#endif
};

struct Int6Lines {
  using Group = Int6Group;
  static constexpr int kLines = 3;
  static constexpr int kMaxWeight = 63;
  static constexpr int kInputs = 16;
  static constexpr int kOrder[kInputs] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  static constexpr int kOperands = 4;
  static constexpr int kPartials = kMaxSum == INT16_MAX ? 2 : 1;

  static QUIRE_INLINE void operands(const char* at, u32x16 (&operands)[kOperands]) { unpack_int6(at, operands); }
  static QUIRE_INLINE i32x16 sum(const Partial (&partials)[kPartials]) {
    i32x16 sum = widened(partials[0]);
    for (int i = 1; i < kPartials; ++i) sum += widened(partials[i]);
    return sum;
  }
};

// -- tiles: R rows times one panel --------------------------------------------------------------------------------------

// The rows of a call in int8, the scale of each, and the sums of their groups.
struct Rows {
  const int8_t* numbers;    // [num_rows, row_stride]
  const float* scales;      // [num_rows]
  const float* group_sums;  // [num_rows, num_groups], whole numbers
  const int32_t* starts;    // in place of them where all weights have a zero in common: times -kCommonZero
  int64_t row_stride;
  int64_t num_groups;
};

QUIRE_INLINE uint32_t load_four(const int8_t* inputs) {
  uint32_t four;
  std::memcpy(&four, inputs, sizeof four);
  return four;
}

// Adds the products of a line of some halves of the panel to partials(row, half, partial).
template <class Lines, int R, class Partials>
QUIRE_INLINE void add_line(const int8_t* inputs, int64_t row_stride, const char* weights, int first_half,
                           const Partials& partials) {
  constexpr int kQuads = Lines::kInputs / 4;
  u32x16 operands[kHalvesTogether][Lines::kOperands];
#pragma GCC unroll 2
  for (int half = 0; half < kHalvesTogether; ++half) {
    const char* at = weights + (first_half + half) * Lines::kLines * kLine;
#pragma GCC unroll 3
    for (int i = 0; i < Lines::kLines; ++i) __builtin_prefetch(at + kAheadBytes + i * kLine, 0, 3);
    Lines::operands(at, operands[half]);
  }
#pragma GCC unroll 12
  for (int row = 0; row < R; ++row) {
#pragma GCC unroll 8
    for (int i = 0; i < Lines::kOperands; ++i) {
      const uint32_t four = load_four(inputs + row * row_stride + i % kQuads * 4);
#pragma GCC unroll 2
      for (int half = 0; half < kHalvesTogether; ++half) {
        add_products(partials(row, half, i * Lines::kPartials / Lines::kOperands), operands[half][i], four);
      }
    }
  }
}

// Adds the products of a group to `sums`, of some halves of the panel.
template <class Lines, int R>
QUIRE_INLINE void add_group(i32x16 (&sums)[R][2], const int8_t* inputs, int64_t row_stride, int64_t num_lines,
                            const char* weights, int first_half) {
  constexpr int64_t kLineBytes = 2 * Lines::kLines * kLine;
  if constexpr (kMaxSum == INT64_MAX && Lines::kPartials == 1) {
    for (int64_t line = 0; line < num_lines; ++line) {
      add_line<Lines, R>(inputs + line * Lines::kInputs, row_stride, weights + line * kLineBytes, first_half,
                         [&](int row, int half, int) -> Partial& { return sums[row][first_half + half]; });
    }
    return;
  }
  constexpr int kOperandsOfPartial = Lines::kOperands / Lines::kPartials;
  constexpr int64_t kMaxLines = kMaxSum / (2 * 127 * Lines::kMaxWeight * kOperandsOfPartial);  // pairs of products are added up
  static_assert(kMaxLines > 0);
  for (int64_t line = 0; line < num_lines;) {
    const int64_t stop = kMaxLines < num_lines - line ? line + kMaxLines : num_lines;
    Partial partials[R][kHalvesTogether][Lines::kPartials];
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalvesTogether; ++half) {
#pragma GCC unroll 2
        for (Partial& partial : partials[row][half]) partial = Partial{};
      }
    }
    for (; line < stop; ++line) {
      add_line<Lines, R>(inputs + line * Lines::kInputs, row_stride, weights + line * kLineBytes, first_half,
                         [&](int row, int half, int partial) -> Partial& { return partials[row][half][partial]; });
    }
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalvesTogether; ++half) sums[row][first_half + half] += Lines::sum(partials[row][half]);
    }
  }
}

// R rows times one panel, without the scales of the rows and the units. Sums of a group are exact; its scale and, if groups have
// zeros of their own, its zero come in once for each row and column.
template <class Lines, int R>
void multiply_tile(f32x16 (*totals)[2], const Rows& rows, int64_t first_row, const PackedWeight& weight, const char* panel) {
  constexpr bool kHasCommonZero = Lines::Group::kCommonZero != 0;
  f32x16 own[R][2] = {};
  for (int64_t group = 0; group < rows.num_groups; ++group) {
    const int8_t* inputs = rows.numbers + first_row * rows.row_stride + group * weight.group_size;
    const int64_t place = first_row * rows.num_groups + group;
    const typename Lines::Group parts(weight, panel, group);
    parts.prefetch_scales();
    i32x16 sums[R][2];
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) {
      sums[row][0] = sums[row][1] = kHasCommonZero ? broadcast<i32x16>(rows.starts[place + row * rows.num_groups]) : i32x16{};
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half += kHalvesTogether) {
      add_group<Lines, R>(sums, inputs, rows.row_stride, weight.group_size / Lines::kInputs, parts.weights, half);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const f32x16 scale = parts.scale(half);
      [[maybe_unused]] const f32x16 zero = parts.zero(half);
#pragma GCC unroll 12
      for (int row = 0; row < R; ++row) {
        f32x16 sum = convert<f32x16>(sums[row][half]);
        if constexpr (!kHasCommonZero) sum -= zero * rows.group_sums[place + row * rows.num_groups];
        own[row][half] += scale * sum;
      }
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < R; ++row) {
    totals[row][0] = own[row][0];
    totals[row][1] = own[row][1];
  }
}

using MultiplyTile = void (*)(f32x16 (*)[2], const Rows&, int64_t, const PackedWeight&, const char*);

template <class Lines, int R = kRowsTogether>
MultiplyTile tile_function(int num_rows) {
  if constexpr (R == 1) {
    return multiply_tile<Lines, 1>;
  } else {
    return num_rows == R ? multiply_tile<Lines, R> : tile_function<Lines, R - 1>(num_rows);
  }
}

template <class Lines>
void put_in_order(int8_t* row, int64_t num_inputs) {
  for (int64_t input = 0; input < num_inputs; input += Lines::kInputs) {
    int8_t ordered[Lines::kInputs];
    for (int i = 0; i < Lines::kInputs; ++i) ordered[i] = row[input + Lines::kOrder[i]];
    std::memcpy(row + input, ordered, Lines::kInputs);
  }
}

template <class Lines>
Rows quantize_rows(const LinearCall& call, ThreadPool& pool) {
  const PackedWeight& weight = *call.weight;
  const LinearScratch scratch(weight, call.num_rows);
  const int64_t num_groups = weight.num_groups();
  int8_t* numbers = reinterpret_cast<int8_t*>(call.scratch + scratch.rows);
  float* scales = reinterpret_cast<float*>(call.scratch + scratch.row_numbers);
  float* group_sums = scales + call.num_rows;
  int32_t* starts = reinterpret_cast<int32_t*>(group_sums);
  const auto prepare = [&](int64_t from, int64_t row) {
    int8_t* to = numbers + row * scratch.row_bytes;
    scales[row] = quantize_row<0>(call, from, to, weight.in_features);
    for (int64_t group = 0; group < num_groups; ++group) {
      int32_t sum = 0;
      for (int64_t i = 0; i < weight.group_size; ++i) sum += to[group * weight.group_size + i];
      constexpr int kZero = Lines::Group::kCommonZero;
      if constexpr (kZero != 0) {
        starts[row * num_groups + group] = -kZero * sum;
      } else {
        group_sums[row * num_groups + group] = static_cast<float>(sum);
      }
    }
    put_in_order<Lines>(to, weight.in_features);
  };
  prepare_rows(call, pool, prepare, [&](int64_t row, int64_t other) {
    std::memcpy(numbers + other * scratch.row_bytes, numbers + row * scratch.row_bytes, weight.in_features);
    scales[other] = scales[row];
    std::memcpy(group_sums + other * num_groups, group_sums + row * num_groups, num_groups * sizeof(float));
  });
  return {numbers, scales, group_sums, starts, scratch.row_bytes, num_groups};
}

template <class Lines>
void multiply(const LinearCall& call, ThreadPool& pool) {
  const PackedWeight& weight = *call.weight;
  const Rows rows = quantize_rows<Lines>(call, pool);
  for_each_task(call, pool, kRowsTogether, [&](const PanelTask& task) {
    for_each_tile<kRowsTogether>(task.first_row, task.last_row, [&](int64_t row, int num_rows, int64_t, int64_t num_tiles) {
      if (num_tiles > 1) prefetch_results(call, task, row, num_rows);
      f32x16 totals[kRowsTogether][2];
      tile_function<Lines>(num_rows)(totals, rows, row, weight, task.panel);
      for (int i = 0; i < num_rows; ++i) {
        for (int half = 0; half < 2; ++half) {
          totals[i][half] =
              totals[i][half] * (Lines::Group::unit(weight, task.panel, half) * rows.scales[row + i]) + task.bias[half];
        }
        store_row(call, row + i, task, totals[i]);
      }
    });
  });
}

}  // namespace

void multiply_groups_int8(const LinearCall& call, ThreadPool& pool) {
  switch (call.weight->format) {
    case WeightFormat::kInt4: return multiply<Int4Lines>(call, pool);
    case WeightFormat::kMxfp4: return multiply<Float4Lines>(call, pool);
    case WeightFormat::kInt6: return multiply<Int6Lines>(call, pool);
    default: return multiply<Int8Lines>(call, pool);
  }
}

}  // namespace quire::QUIRE_ISA
