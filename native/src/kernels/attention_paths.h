// In what numbers attention computes its products, and how keys and values become columns of them. Compiled once for each
// instruction set.
#pragma once

#include "attention.h"
#include "bf16_pairs.h"
#include "int4_kv.h"
#include "simd.h"
#include "transpose.h"
#if defined(__AMX_BF16__)
#include "amx_rows.h"
#endif

namespace quire::QUIRE_ISA {

constexpr int kTileVectors = kTileTokens / kLanes;

// Where the keys and values of a tile lie, and their scales, if they have some. Tokens that nobody sees lead to zeros.
struct Tile {
  // Tokens of one block.
  struct Piece {
    int first, count;
    const float* scales[2];
  };

  const char* rows[2][kTileTokens];  // keys, values
  Piece pieces[kTileTokens];
  int num_pieces;
  alignas(64) float scales[2][kTileTokens];
};

// The tile that comes next, fetched a row at a time all through the work on this one: a core has few lines under way at once,
// and waits when it is asked for more.
struct Ahead {
  const char* const* rows;
  int64_t num_left;
  int64_t row_bytes;

  QUIRE_INLINE void fetch() {
    if (num_left == 0) return;
    for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(*rows + at, 0, 2);
    ++rows;
    --num_left;
  }
};

// A whole number of 16 bits: of each four, the higher bytes lie before the lower ones. See attention_bytes.h.
struct SplitNumber {
  uint8_t bytes[2];
};

// One of a query for keys in four bits: of each eight, those with even numbers lie before the others.
struct EvenOddNumber : SplitNumber {};

// What a query's products are to be multiplied by, and the sum of its numbers where they are whole.
struct QueryRow {
  float unit;
  int32_t sum;
};

// -- paths: in what numbers the products are computed ---------------------------------------------------------------------

// A sum of which a group of consecutive steps is added up. Here, each step is added to the sum.
template <class Path>
struct PlainGroup {
  using Sum = typename Path::Sum;

  Sum sum;

  QUIRE_INLINE void begin(const Sum& before) { sum = before; }
  template <class Input, class Column>
  QUIRE_INLINE void add(Input input, Column column) {
    Path::add(sum, input, column);
  }
  template <class Input, class Column>
  QUIRE_INLINE void add_values(Input input, Column column) {
    Path::add_values(sum, input, column);
  }
  QUIRE_INLINE const Sum& total() const { return sum; }
};

struct NoRegisters {};

// Takes a query as it is.
template <class From, class Number>
QueryRow take_row(const From* row, int64_t count, float scale, Number* to) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(row + i));
  return {scale, 0};
}

// Sums of floats: scores, and weighted sums that are added up in one accumulator from the first tile to the last.
struct FloatSums {
  using Sum = f32x16;
  static constexpr int kSumRegisters = 1;
  static constexpr int kColumnsTogether = 1;

  static QUIRE_INLINE void store_scores(float* to, f32x16 sum) { store(to, sum); }
  template <class T>
  static QUIRE_INLINE f32x16 load_scores(const float* from, const QueryRow& query) {
    return load(from) * query.unit;
  }
  static QUIRE_INLINE f32x16 begin(const float* totals, float factor) { return load(totals) * factor; }
  static QUIRE_INLINE void end(float* totals, float, f32x16 sum, float) { store(totals, sum); }
};

#if defined(__AMX_BF16__)
// Features plus kInt4Zero, in the low four bits of both halves of each lane, as bf16.
QUIRE_INLINE u32x16 int4_as_bf16(u32x16 pairs) {
  alignas(64) static constexpr uint16_t kNumbers[2 * kLanes] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  return bits_as<u32x16>(_mm512_permutexvar_epi16(bits_as<__m512i>(pairs), _mm512_load_si512(kNumbers)));
}
#endif

// Pairs of bf16, summed in float32. Keys are packed as [head_dim / 2][64][2], values as [32][head_dim][2].
struct BFloat16Path : FloatSums {
  using Number = bf16;
  using Column = u32x16;
  using Group = PlainGroup<BFloat16Path>;
  using Registers = NoRegisters;
  static constexpr int kInputs = 2;  // numbers of a sum that one step adds
  static constexpr int kKeyInputs = kInputs;
  static constexpr int kGroupSteps = 1;

  static QUIRE_INLINE Column column(const char* at) { return load_bits<Column>(at); }
  static QUIRE_INLINE uint32_t input(const bf16* row, int64_t step) { return load_pair(row + 2 * step); }
  static QUIRE_INLINE uint32_t query_input(const bf16* row, int64_t step) { return input(row, step); }
  static QUIRE_INLINE void add(f32x16& sum, uint32_t input, Column column) { add_pair_products(sum, input, column); }
  static QUIRE_INLINE void add_values(f32x16& sum, uint32_t input, Column column) { add(sum, input, column); }

  // 2 * N features, of which each pair becomes a lane.
  template <int N>
  static QUIRE_INLINE u32x16 load_pairs(const bf16* from) {
    if constexpr (N == kLanes) {
      return load_bits<u32x16>(from);
    } else {
      bf16 numbers[2 * kLanes] = {};
      std::memcpy(numbers, from, N * 4);
      return load_bits<u32x16>(numbers);
    }
  }
  static QUIRE_INLINE u32x16 pair_values(const bf16* even, const bf16* odd) { return load_wide(even) | load_wide(odd) << 16; }

#if defined(__AMX_BF16__)
  // Bytes, and halves of them, as bf16, which holds them exactly.
  template <int N>
  static QUIRE_INLINE u32x16 load_pairs(const int8_t* from) {
    const f32x16 low = load(from);
    const f32x16 high = N == kLanes ? load(from + kLanes) : f32x16{};
    return bits_as<u32x16>(_mm512_cvtne2ps_pbh(bits_as<__m512>(high), bits_as<__m512>(low)));
  }
  static QUIRE_INLINE u32x16 pair_values(const int8_t* even, const int8_t* odd) {
    return bits_as<u32x16>(load(even)) >> 16 | bits_as<u32x16>(load(odd));  // the low halves of the odd ones are zero
  }
  template <int N>
  static QUIRE_INLINE u32x16 load_pairs(const Int4Pair* from) {
    i8x16 bytes{};
    std::memcpy(&bytes, from, N);
    const u32x16 pairs = bits_as<u32x16>(_mm512_cvtepu8_epi32(bits_as<__m128i>(bytes)));
    return int4_as_bf16(pairs | pairs << 12);  // the lowest bit of the second beside the first makes no difference
  }
  static QUIRE_INLINE u32x16 pair_values(const Int4Pair* even, const Int4Pair* odd) {
    return int4_as_bf16(load_int4(even) | load_int4(odd) << 16);
  }
#endif

  // N pairs of features of sixteen tokens, each in a lane of every column.
  template <int N, class T>
  static QUIRE_INLINE void key_columns(const T* const* rows, int64_t feature, Column (&columns)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) columns[i] = load_pairs<N>(feature_of(rows[i], feature));
    transpose(columns);
  }

  // 16 * N features of a step's tokens, of which `rows` are the numbers.
  template <int N, class T>
  static QUIRE_INLINE void value_columns(const T* const* rows, int64_t feature, Column (&columns)[N]) {
    for (int i = 0; i < N; ++i) {
      columns[i] = pair_values(feature_of(rows[0], feature + i * kLanes), feature_of(rows[1], feature + i * kLanes));
    }
  }
};

#if defined(__AMX_BF16__)
// What BFloat16Product adds to a sum in one instruction. Denormal numbers have to count as zero, see ZeroDenormals.
struct AmxGroup {
  f32x16 sum, even, odd;

  QUIRE_INLINE void begin(f32x16 before) {
    sum = before;
    even = odd = f32x16{};
  }
  QUIRE_INLINE void add(uint32_t input, u32x16 column) {
    add_product(even, input << 16, column << 16);
    add_product(odd, input & 0xffff0000u, column & 0xffff0000u);
  }
  QUIRE_INLINE void add_values(uint32_t input, u32x16 column) { add(input, column); }
  QUIRE_INLINE f32x16 total() const { return sum + (even + odd); }

 private:
  static QUIRE_INLINE void add_product(f32x16& to, uint32_t input, u32x16 column) {
    const __m512 factor = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(input)));
    to = bits_as<f32x16>(_mm512_fmadd_ps(factor, bits_as<__m512>(column), bits_as<__m512>(to)));
  }
};

// What the instructions of AMX do always, and others only if told to.
class ZeroDenormals {
 public:
  ZeroDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kInputsAndResults); }
  ~ZeroDenormals() { _mm_setcsr(before_); }
  ZeroDenormals(const ZeroDenormals&) = delete;
  ZeroDenormals& operator=(const ZeroDenormals&) = delete;

 private:
  static constexpr unsigned kInputsAndResults = 0x8040;

  const unsigned before_;
};

// As before, for many rows in the tile registers, and for few in the same order. Heads have whole groups of features.
struct AmxPath : BFloat16Path {
  struct Registers : AmxRegisters {
    ZeroDenormals zero_denormals;
  };
  using Group = AmxGroup;
  static constexpr int kSumRegisters = 2;
  static constexpr int kGroupSteps = kStepsOfTile;
  static constexpr int kGroupFeatures = kGroupSteps * kInputs;
};
#endif

// Float32 throughout. Keys are packed as [head_dim][64], values as [64][head_dim].
struct Float32Path : FloatSums {
  using Number = float;
  using Column = f32x16;
  using Group = PlainGroup<Float32Path>;
  using Registers = NoRegisters;
  static constexpr int kInputs = 1;
  static constexpr int kKeyInputs = kInputs;
  static constexpr int kGroupSteps = 1;

  static QUIRE_INLINE Column column(const char* at) { return load(reinterpret_cast<const float*>(at)); }
  static QUIRE_INLINE float input(const float* row, int64_t step) { return row[step]; }
  static QUIRE_INLINE float query_input(const float* row, int64_t step) { return input(row, step); }
  static QUIRE_INLINE void add(f32x16& sum, float input, Column column) { sum += input * column; }
  static QUIRE_INLINE void add_values(f32x16& sum, float input, Column column) { add(sum, input, column); }

  template <int N, class T>
  static QUIRE_INLINE void key_columns(const T* const* rows, int64_t feature, Column (&columns)[kLanes]) {
    u32x16 bits[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) bits[i] = bits_as<u32x16>(load(feature_of(rows[i], feature)));
    transpose(bits);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) columns[i] = bits_as<f32x16>(bits[i]);
  }

  template <int N, class T>
  static QUIRE_INLINE void value_columns(const T* const* rows, int64_t feature, Column (&columns)[N]) {
    for (int i = 0; i < N; ++i) columns[i] = load(feature_of(rows[0], feature + i * kLanes));
  }
};

}  // namespace quire::QUIRE_ISA
