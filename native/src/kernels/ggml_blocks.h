// Rows of a matrix in blocks as GGUF files have them, taken apart. Layouts: https://github.com/ggml-org/ggml, ggml-common.h.
#pragma once

#include "group_panels.h"
#include "packing.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr float kMaxZero = 60000.0f;  // zeros are held in float16
constexpr uint8_t kIq4Numbers[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // 128 more

// What a row is taken apart into: a step in each byte, and what the steps of each group stand for.
struct UnpackedRow {
  uint8_t* steps;
  float* scales;
  float* zeros;
};

QUIRE_INLINE float half_at(const uint8_t* place) {
  fp16 number;
  std::memcpy(&number, place, sizeof number);
  return to_float(number);
}

template <int kCount>
using Bytes = Vector<uint8_t, kCount>;

// Of 2 * kCount numbers, the first half in the low bits.
template <int kCount>
QUIRE_INLINE void take_nibbles(const uint8_t* from, uint8_t* steps) {
  const auto octets = load_bits<Bytes<kCount>>(from);
  store_bits(steps, octets & 15);
  store_bits(steps + kCount, octets >> 4);
}

// Adds 16 to those of 32 steps whose bit is set, the lowest first.
QUIRE_INLINE void add_fifth_bits(const uint8_t* from, uint8_t* steps) {
  for (int i = 0; i < 4; ++i) {
    uint64_t octet;
    std::memcpy(&octet, steps + i * 8, sizeof octet);
    const uint64_t bits = from[i] * 0x0101010101010101u & 0x8040201008040201u;  // one in each byte
    octet += (bits + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
    std::memcpy(steps + i * 8, &octet, sizeof octet);
  }
}

// Two bits of each of 256 numbers: of 128 in 32 bytes, the lowest bits first.
QUIRE_INLINE void take_crumbs(const uint8_t* from, uint8_t* steps) {
  for (int half = 0; half < 2; ++half) {
    const auto octets = load_bits<Bytes<32>>(from + half * 32);
    for (int part = 0; part < 4; ++part) store_bits(steps + half * 128 + part * 32, octets >> (2 * part) & 3);
  }
}

// A further bit of each of 256 numbers, of 32 in the same bit of 32 bytes.
QUIRE_INLINE void add_bits(const uint8_t* from, int bit, uint8_t* steps) {
  const auto octets = load_bits<Bytes<32>>(from);
  for (int group = 0; group < 8; ++group) {
    uint8_t* to = steps + group * 32;
    store_bits(to, load_bits<Bytes<32>>(to) | (octets >> group & 1) << bit);
  }
}

// What the numbers of a table are, in place of their places there.
QUIRE_INLINE void look_up(uint8_t* steps) {
#if defined(__AVX2__)
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Numbers));
  for (int i = 0; i < 2; ++i) {
    __m128i* to = reinterpret_cast<__m128i*>(steps) + i;
    _mm_storeu_si128(to, _mm_shuffle_epi8(table, _mm_loadu_si128(to)));
  }
#elif defined(__aarch64__)
  for (int i = 0; i < 32; i += 16) vst1q_u8(steps + i, vqtbl1q_u8(vld1q_u8(kIq4Numbers), vld1q_u8(steps + i)));
#else
  for (int i = 0; i < 32; ++i) steps[i] = kIq4Numbers[steps[i]];
#endif
}

QUIRE_INLINE void take_group(const UnpackedRow& to, int64_t group, float scale, float zero) {
  to.scales[group] = scale;
  to.zeros[group] = zero;
}

// Scales and least numbers of a block's eight groups: 6 bits each, the high two of the last four in the bytes of the first four.
QUIRE_INLINE void take_scales_of_8(const uint8_t* from, const UnpackedRow& to, int64_t first_group) {
  const float unit = half_at(from), unit_of_least = half_at(from + 2);
  uint32_t words[3];
  std::memcpy(words, from + 4, sizeof words);
  const uint32_t scales[2] = {words[0] & 0x3f3f3f3f, (words[2] & 0x0f0f0f0f) | (words[0] >> 2 & 0x30303030)};
  const uint32_t least[2] = {words[1] & 0x3f3f3f3f, (words[2] >> 4 & 0x0f0f0f0f) | (words[1] >> 2 & 0x30303030)};
  uint8_t steps[2][8];
  std::memcpy(steps[0], scales, 8);
  std::memcpy(steps[1], least, 8);
  for (int i = 0; i < 8; ++i) {
    to.scales[first_group + i] = unit * static_cast<float>(steps[0][i]);
    to.zeros[first_group + i] = -(unit_of_least * static_cast<float>(steps[1][i]));
  }
}

// Has groups of numbers step * scale + zero, as blocks with minima have them, stand for (step - zero) * scale. In a flat group all
// numbers are the least one, or as good as: 0 less a zero of -1, times it.
inline void place_zeros(const UnpackedRow& row, int64_t num_groups, int64_t group_size) {
  for (int64_t first = 0; first < num_groups; first += kLanes) {
    const f32x16 scales = load(row.scales + first), least = load(row.zeros + first);
    const auto is_flat = maximum(scales, -scales) * kMaxZero <= maximum(least, -least);
    store(row.scales + first, select(is_flat, least, scales));
    store(row.zeros + first, select(is_flat, splat(-1.0f), -least / scales));
    int32_t are_flat[kLanes];
    store_bits(are_flat, bits_as<i32x16>(is_flat));
    const int64_t count = min(num_groups - first, kLanes);
    for (int64_t i = 0; i < count; ++i) {
      if (are_flat[i]) std::memset(row.steps + (first + i) * group_size, 0, group_size);
    }
  }
}

// A kind of blocks: how many numbers one has in how many bytes, whether they are step * scale + least, and how to take one apart.
struct Q4_0 {
  static constexpr int64_t kNumbers = 32, kBytes = 18;
  static constexpr bool kHasLeast = false;
  static QUIRE_INLINE void unpack(const uint8_t* from, const UnpackedRow& row, int64_t block) {
    take_nibbles<16>(from + 2, row.steps + block * 32);
    take_group(row, block, half_at(from), 8.0f);
  }
};

struct Q4_1 {
  static constexpr int64_t kNumbers = 32, kBytes = 20;
  static constexpr bool kHasLeast = true;
  static QUIRE_INLINE void unpack(const uint8_t* from, const UnpackedRow& row, int64_t block) {
    take_nibbles<16>(from + 4, row.steps + block * 32);
    take_group(row, block, half_at(from), half_at(from + 2));
  }
};

// 16 stands for 0 in the file, kInt6Zero in the steps.
struct Q5_0 {
  static constexpr int64_t kNumbers = 32, kBytes = 22;
  static constexpr bool kHasLeast = false;
  static QUIRE_INLINE void unpack(const uint8_t* from, const UnpackedRow& row, int64_t block) {
    uint8_t* steps = row.steps + block * 32;
    take_nibbles<16>(from + 6, steps);
    add_fifth_bits(from + 2, steps);
    store_bits(steps, load_bits<Bytes<32>>(steps) + (kInt6Zero - 16));
    take_group(row, block, half_at(from), kInt6Zero);
  }
};

struct Q5_1 {
  static constexpr int64_t kNumbers = 32, kBytes = 24;
  static constexpr bool kHasLeast = true;
  static QUIRE_INLINE void unpack(const uint8_t* from, const UnpackedRow& row, int64_t block) {
    take_nibbles<16>(from + 8, row.steps + block * 32);
    add_fifth_bits(from + 4, row.steps + block * 32);
    take_group(row, block, half_at(from), half_at(from + 2));
  }
};

struct Q8_0 {
  static constexpr int64_t kNumbers = 32, kBytes = 34;
  static constexpr bool kHasLeast = false;
  static QUIRE_INLINE void unpack(const uint8_t* from, const UnpackedRow& row, int64_t block) {
    store_bits(row.steps + block * 32, load_bits<Bytes<32>>(from + 2) + 128);
    take_group(row, block, half_at(from), 128.0f);
  }
};

struct Q2_K {
  static constexpr int64_t kNumbers = 256, kBytes = 84;
  static constexpr bool kHasLeast = true;
  static QUIRE_INLINE void unpack(const uint8_t* from, const UnpackedRow& row, int64_t block) {
    take_crumbs(from + 16, row.steps + block * 256);
    uint8_t parts[2][16];
    take_nibbles<16>(from, parts[0]);
    store(row.scales + block * 16, load(reinterpret_cast<const int8_t*>(parts[0])) * half_at(from + 80));
    store(row.zeros + block * 16, -(load(reinterpret_cast<const int8_t*>(parts[1])) * half_at(from + 82)));
  }
};

// Third bits as the fifth ones of kQ5_K; 4 stands for 0. Scales have 6 bits, 32 is 0: the low 4 in 8 bytes, low halves first, the
// others in 4 bytes, two bits after two.
struct Q3_K {
  static constexpr int64_t kNumbers = 256, kBytes = 110;
  static constexpr bool kHasLeast = false;
  static QUIRE_INLINE void unpack(const uint8_t* from, const UnpackedRow& row, int64_t block) {
    uint8_t* steps = row.steps + block * 256;
    take_crumbs(from + 32, steps);
    add_bits(from, 2, steps);
    int8_t scales[16];
    for (int i = 0; i < 16; ++i) {
      const int low = from[96 + i % 8] >> (i / 8 * 4) & 15, high = from[104 + i % 4] >> (i / 4 * 2) & 3;
      scales[i] = static_cast<int8_t>((low | high << 4) - 32);
    }
    store(row.scales + block * 16, load(scales) * half_at(from + 108));
    store(row.zeros + block * 16, splat(4.0f));
  }
};

struct Q4_K {
  static constexpr int64_t kNumbers = 256, kBytes = 144;
  static constexpr bool kHasLeast = true;
  static QUIRE_INLINE void unpack(const uint8_t* from, const UnpackedRow& row, int64_t block) {
    for (int i = 0; i < 4; ++i) take_nibbles<32>(from + 16 + i * 32, row.steps + block * 256 + i * 64);
    take_scales_of_8(from, row, block * 8);
  }
};

struct Q5_K {
  static constexpr int64_t kNumbers = 256, kBytes = 176;
  static constexpr bool kHasLeast = true;
  static QUIRE_INLINE void unpack(const uint8_t* from, const UnpackedRow& row, int64_t block) {
    uint8_t* steps = row.steps + block * 256;
    for (int i = 0; i < 4; ++i) take_nibbles<32>(from + 48 + i * 32, steps + i * 64);
    add_bits(from + 16, 4, steps);
    take_scales_of_8(from, row, block * 8);
  }
};

struct Q6_K {
  static constexpr int64_t kNumbers = 256, kBytes = 210;
  static constexpr bool kHasLeast = false;
  static QUIRE_INLINE void unpack(const uint8_t* from, const UnpackedRow& row, int64_t block) {
    for (int half = 0; half < 2; ++half) {
      uint8_t* steps = row.steps + block * 256 + half * 128;
      take_nibbles<64>(from + half * 64, steps);
      const auto high = load_bits<Bytes<32>>(from + 128 + half * 32);
      for (int part = 0; part < 4; ++part) {
        uint8_t* to = steps + part * 32;
        store_bits(to, load_bits<Bytes<32>>(to) | (high >> (2 * part) & 3) << 4);
      }
    }
    store(row.scales + block * 16, load(reinterpret_cast<const int8_t*>(from + 192)) * half_at(from + 208));
    store(row.zeros + block * 16, splat(kInt6Zero));
  }
};

struct IQ4_NL {
  static constexpr int64_t kNumbers = 32, kBytes = 18;
  static constexpr bool kHasLeast = false;
  static QUIRE_INLINE void unpack(const uint8_t* from, const UnpackedRow& row, int64_t block) {
    uint8_t* steps = row.steps + block * 32;
    take_nibbles<16>(from + 2, steps);
    look_up(steps);
    take_group(row, block, half_at(from), 128.0f);
  }
};

// The scales have 6 bits, 32 is 0: the high ones in 2 bytes, then the low ones in 4.
struct IQ4_XS {
  static constexpr int64_t kNumbers = 256, kBytes = 136;
  static constexpr bool kHasLeast = false;
  static QUIRE_INLINE void unpack(const uint8_t* from, const UnpackedRow& row, int64_t block) {
    const float unit = half_at(from);
    for (int i = 0; i < 8; ++i) {
      uint8_t* steps = row.steps + block * 256 + i * 32;
      take_nibbles<16>(from + 8 + i * 16, steps);
      look_up(steps);
      const int low = from[4 + i / 2] >> (i % 2 * 4) & 15, high = from[2 + i / 4] >> (i % 4 * 2) & 3;
      take_group(row, block * 8 + i, unit * static_cast<float>((low | high << 4) - 32), 128.0f);
    }
  }
};

// Has codes in place of steps.
struct MXFP4 {
  static constexpr int64_t kNumbers = 32, kBytes = 17;
  static constexpr uint8_t kMaxExponent = 252;  // 12 times the next power of two is infinite
};

// A row of blocks of one kind: compilers vectorize little of a loop over all kinds.
template <class Block>
__attribute__((noinline)) void unpack_row(const uint8_t* rows, int64_t number, const PackedWeight& weight,
                                          const UnpackedRow& to) {
  const int64_t num_blocks = weight.in_features / Block::kNumbers;
  const uint8_t* row = rows + number * num_blocks * Block::kBytes;
  for (int64_t block = 0; block < num_blocks; ++block) Block::unpack(row + block * Block::kBytes, to, block);
  if (Block::kHasLeast) place_zeros(to, weight.num_groups(), weight.group_size);
}

// All kinds but MXFP4.
inline void unpack_row(GgmlBlock kind, const uint8_t* rows, int64_t number, const PackedWeight& weight, const UnpackedRow& to) {
  switch (kind) {
    case GgmlBlock::kQ4_0: return unpack_row<Q4_0>(rows, number, weight, to);
    case GgmlBlock::kQ4_1: return unpack_row<Q4_1>(rows, number, weight, to);
    case GgmlBlock::kQ5_0: return unpack_row<Q5_0>(rows, number, weight, to);
    case GgmlBlock::kQ5_1: return unpack_row<Q5_1>(rows, number, weight, to);
    case GgmlBlock::kQ8_0: return unpack_row<Q8_0>(rows, number, weight, to);
    case GgmlBlock::kQ2_K: return unpack_row<Q2_K>(rows, number, weight, to);
    case GgmlBlock::kQ3_K: return unpack_row<Q3_K>(rows, number, weight, to);
    case GgmlBlock::kQ4_K: return unpack_row<Q4_K>(rows, number, weight, to);
    case GgmlBlock::kQ5_K: return unpack_row<Q5_K>(rows, number, weight, to);
    case GgmlBlock::kQ6_K: return unpack_row<Q6_K>(rows, number, weight, to);
    case GgmlBlock::kIQ4_NL: return unpack_row<IQ4_NL>(rows, number, weight, to);
    case GgmlBlock::kIQ4_XS: return unpack_row<IQ4_XS>(rows, number, weight, to);
    case GgmlBlock::kNone:
    case GgmlBlock::kMXFP4: return;
  }
}

}  // namespace quire::QUIRE_ISA
