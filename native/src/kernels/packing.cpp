// See packing.h. Compiled once for each instruction set.
#include "packing.h"

#include "ggml_blocks.h"
#include "group_panels.h"
#include "simd.h"
#include "transpose.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kNumShares = 3;
constexpr float kRangeShares[kNumShares] = {1.0f, 0.9f, 0.8f};  // of a group's range that 16 steps may span: first all
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, ties to even, in the low bits

QUIRE_INLINE f32x16 load_weights(const WeightSource& source, int64_t place, int64_t count) {
  const auto read = [&](auto* from) {
    return count >= kLanes ? load(from + place) : load_some(from + place, static_cast<int>(count));
  };
  switch (source.type) {
    case DType::kBFloat16: return read(static_cast<const bf16*>(source.rows));
    case DType::kFloat16: return read(static_cast<const fp16*>(source.rows));
    default: return read(static_cast<const float*>(source.rows));
  }
}

// A panel and the column of it that is being filled.
struct Column {
  const PackedWeight* weight;
  char* panel;
  int index;
  float* norms = nullptr;  // of its row, and num_panels() panels behind it, of what the row lacks; null: not needed
};

// Where the 32 bits that a step or a group has of each of sixteen columns lie, line after line, see linear.h.
class Lines {
 public:
  Lines(const PackedWeight& weight, char* panel, int half) : group_(panel), step_(kPanelColumns * 4) {
    int64_t line = half * kLine;
    if (weight.in_groups()) {
      const int64_t header = weight.format == WeightFormat::kMxfp4  ? 0
                             : weight.format == WeightFormat::kInt6 ? Int6Group::kHeader
                                                                    : kGroupHeader;
      group_bytes_ = weight.group_bytes();
      lines_per_group_ = (group_bytes_ - header) / (2 * kLine);
      group_ += header + weight.exponent_bytes();
    }
    if (weight.format == WeightFormat::kInt6) {
      lines_per_run_ = 3;
      step_ = kLine;
      line *= 3;
    }
    group_ += line;
    at_ = group_;
  }

  QUIRE_INLINE char* next() {
    char* line = at_;
    at_ += step_;
    if (++num_in_run_ == lines_per_run_) {
      num_in_run_ = 0;
      at_ += 3 * kLine;  // of the other half
    }
    if (++num_in_group_ == lines_per_group_) {
      num_in_group_ = 0;
      at_ = group_ += group_bytes_;
    }
    return line;
  }

 private:
  char *group_, *at_;
  int64_t step_, group_bytes_ = 0;
  int64_t lines_per_run_ = 0, lines_per_group_ = 0;  // 0: there is one
  int64_t num_in_run_ = 0, num_in_group_ = 0;
};

// Of eight steps, four in each argument: those with even numbers in the low half, then those with odd ones.
QUIRE_INLINE u32x16 int4_line(u32x16 first, u32x16 second) {
  const auto pairs = [](u32x16 fours) {
    fours &= 0x0f0f0f0f;
    return fours | fours >> 12;  // even ones in the lowest byte, odd ones in the next
  };
  const u32x16 low = pairs(first), high = pairs(second);
  return (low & 0xff) | (high & 0xff) << 8 | (low & 0xff00) << 8 | (high & 0xff00) << 16;
}

// Stores the steps of sixteen inputs, four in each argument; see unpack_int6.
QUIRE_INLINE void store_int6_lines(const u32x16* fours, Lines& to) {
  const auto low = [&](int i) { return fours[i] & 0x0f0f0f0f; };
  const auto high = [&](int i) { return fours[i] >> 4 & 0x03030303; };
  store_bits(to.next(), low(0) | low(1) << 4);
  store_bits(to.next(), low(2) | low(3) << 4);
  store_bits(to.next(), high(0) | high(1) << 2 | high(2) << 4 | high(3) << 6);
}

// Puts numbers of sixteen columns side by side, 32 bits of each, and steps in fewer bits closer together.
void interleave(const char* const (&columns)[kLanes], int64_t num_words, WeightFormat format, Lines to) {
  for (int64_t first = 0; first < num_words; first += kLanes) {
    const int64_t count = min(num_words - first, kLanes);
    u32x16 lines[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      if (count == kLanes) {
        lines[i] = load_bits<u32x16>(columns[i] + first * 4);
      } else {
        uint32_t line[kLanes] = {};
        std::memcpy(line, columns[i] + first * 4, count * 4);
        lines[i] = load_bits<u32x16>(line);
      }
    }
    transpose(lines);
    if (format == WeightFormat::kInt6) {
      for (int64_t i = 0; i < count; i += 4) store_int6_lines(lines + i, to);
    } else if (format == WeightFormat::kInt4 || format == WeightFormat::kMxfp4) {
      for (int64_t i = 0; i < count; i += 2) store_bits(to.next(), int4_line(lines[i], lines[i + 1]));
    } else {
      for (int64_t i = 0; i < count; ++i) store_bits(to.next(), lines[i]);
    }
  }
}

// The numbers of a row in type T, with zeros up to a whole number of steps: in `buffer`, or where they are already.
template <class T, DType type, int Inputs>
const char* float_row(const PackedWeight& weight, const WeightSource& source, int64_t row, char* buffer) {
  const int64_t num_inputs = weight.in_features;
  if (source.type == type && num_inputs % Inputs == 0)
    return static_cast<const char*>(source.rows) + row * num_inputs * sizeof(T);
  T* values = reinterpret_cast<T*>(buffer);
  for (int64_t input = 0; input < num_inputs + Inputs - 1; input += kLanes) {
    store(values + input, load_weights(source, row * num_inputs + input, num_inputs - input));
  }
  return buffer;
}

void pack_float16_row(const Column& column, const WeightSource& source, int64_t row, char* buffer) {
  const char* values = float_row<fp16, DType::kFloat16, 1>(*column.weight, source, row, buffer);
  for (int64_t input = 0; input < column.weight->in_features; ++input) {
    std::memcpy(column.panel + (input * kPanelColumns + column.index) * 2, values + input * 2, 2);
  }
}

// NaN if there is a NaN or an infinity: what is scaled by it becomes one too.
QUIRE_INLINE float largest_magnitude(const WeightSource& source, int64_t place, int64_t count) {
  f32x16 largest = {}, unsound = {};
  for (int64_t input = 0; input < count; input += kLanes) {
    const f32x16 values = load_weights(source, place + input, count - input);
    largest = maximum(largest, maximum(values, -values));
    unsound += values * 0.0f;
  }
  return max_of_lanes(largest) + sum_of_lanes(unsound);
}

// The steps of a row, in `buffer`; its scale and sum go into the panel.
const char* int8_row(const Column& column, const WeightSource& source, int64_t row, char* buffer) {
  const int64_t num_inputs = column.weight->in_features;
  const int64_t num_steps = (num_inputs + 3) / 4;
  int8_t* values = reinterpret_cast<int8_t*>(buffer);
  std::memset(values, 0, num_steps * 4);
  float scale;
  if (source.type == DType::kInt8) {
    std::memcpy(values, static_cast<const int8_t*>(source.rows) + row * num_inputs, num_inputs);
    scale = source.scales[row];
  } else {
    const float limit = largest_magnitude(source, row * num_inputs, num_inputs);
    const float inverse = limit > 0.0f ? 127.0f / limit : 0.0f;
    scale = limit / 127.0f;
    f32x16 squares = {}, squares_lacking = {};
    for (int64_t input = 0; input < num_inputs; input += kLanes) {
      const f32x16 weights = load_weights(source, row * num_inputs + input, num_inputs - input);
      const i32x16 rounded = bits_as<i32x16>(weights * inverse + kRound) - bits_as<i32x16>(splat(kRound));
      const i8x16 bytes = low_bytes(rounded);
      std::memcpy(values + input, &bytes, kLanes);
      const f32x16 held = convert<f32x16>(rounded) * scale, lacking = weights - held;
      squares += held * held;
      squares_lacking += lacking * lacking;
    }
    if (column.norms != nullptr) {
      column.norms[0] = __builtin_sqrtf(sum_of_lanes(squares));
      column.norms[column.weight->num_panels() * kPanelColumns] = __builtin_sqrtf(sum_of_lanes(squares_lacking));
    }
  }
  int32_t sum = 0;
  for (int64_t input = 0; input < num_inputs; ++input) sum += values[input];
  char* tail = column.panel + num_steps * 4 * kPanelColumns;
  std::memcpy(tail + column.index * 4, &scale, 4);
  std::memcpy(tail + (kPanelColumns + column.index) * 4, &sum, 4);
  return buffer;
}

// What the steps 0 to `last` of a group stand for: (step - zero) * scale.
struct GroupRange {
  float scale, zero;
  float last = 15.0f;

  QUIRE_INLINE f32x16 places_of(f32x16 weights) const { return weights * (scale > 0.0f ? 1.0f / scale : 0.0f) + zero; }
  QUIRE_INLINE f32x16 within(f32x16 places) const { return minimum(maximum(places, f32x16{}), splat(last)); }
  // Rounded, in the low bits.
  QUIRE_INLINE f32x16 steps_of(f32x16 weights) const { return within(places_of(weights)) + kRound; }
  // In steps. Of the whole range of a group, no weight is cut off.
  QUIRE_INLINE f32x16 errors_of(f32x16 weights, bool is_whole) const {
    const f32x16 places = places_of(weights);
    return (is_whole ? places : within(places)) + kRound - kRound - places;
  }
};

// The sixteen steps over a group's weights and 0, or over less, with the outermost weights cut off: whichever has the least squared
// error. NaN if there is a NaN or an infinity.
GroupRange best_range(const float* weights, int64_t count) {
  f32x16 lowest = {}, highest = {}, unsound = {};
  for (int64_t input = 0; input < count; input += kLanes) {
    const f32x16 values = load(weights + input);
    lowest = minimum(lowest, values);
    highest = maximum(highest, values);
    unsound += values * 0.0f;
  }
  const float low = -max_of_lanes(-lowest), high = max_of_lanes(highest);
  const float scale = (high - low) / 15.0f + sum_of_lanes(unsound);
  if (!(scale > 0.0f)) return {scale, 0.0f};
  GroupRange ranges[kNumShares];  // whose zeros are the same step
  for (int i = 0; i < kNumShares; ++i) ranges[i] = {scale * kRangeShares[i], -low / scale};
  f32x16 sums[kNumShares] = {};
  for (int64_t input = 0; input < count; input += kLanes) {
    const f32x16 values = load(weights + input);
#pragma GCC unroll 3
    for (int i = 0; i < kNumShares; ++i) {
      const f32x16 error = ranges[i].errors_of(values, i == 0);
      sums[i] += error * error;
    }
  }
  GroupRange best = ranges[0];
  float least = __builtin_inff();
  for (int i = 0; i < kNumShares; ++i) {
    const float error = sum_of_lanes(sums[i]) * ranges[i].scale * ranges[i].scale;
    if (error < least) {
      least = error;
      best = ranges[i];
    }
  }
  return best;
}

// Memory for a row in groups, and for its numbers: zeros follow what groups have, up to a whole vector.
struct GroupMemory : UnpackedRow {
  float* weights;  // [in_features]

  GroupMemory(const PackedWeight& weight, char* buffer) {
    const int64_t padded = round_up(weight.num_groups(), kLanes);
    scales = reinterpret_cast<float*>(buffer);
    zeros = scales + padded;
    weights = zeros + padded;
    steps = reinterpret_cast<uint8_t*>(weights + weight.in_features);
    store(zeros - kLanes, f32x16{});
    store(weights - kLanes, f32x16{});
  }
};

// The power of two that scales are stored as multiples of: the largest finite one becomes 2^14 to 2^15.
float unit_of(const float* scales, int64_t count) {
  f32x16 largest = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const f32x16 values = load(scales + i), magnitudes = maximum(values, -values);
    largest = maximum(largest, select(magnitudes < splat(__builtin_inff()), magnitudes, f32x16{}));
  }
  const float finite = max_of_lanes(largest);
  if (finite == 0.0f) return 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &finite, sizeof bits);
  bits = static_cast<uint32_t>(max((bits >> 23) - int64_t{14}, 1)) << 23;
  float unit;
  std::memcpy(&unit, &bits, sizeof unit);
  return unit;
}

void take_steps(GroupRange range, const float* weights, int64_t count, uint8_t* steps) {
  for (int64_t input = 0; input < count; input += kLanes) {
    const i32x16 rounded = bits_as<i32x16>(range.steps_of(load(weights + input))) - bits_as<i32x16>(splat(kRound));
    const i8x16 bytes = low_bytes(rounded);
    std::memcpy(steps + input, &bytes, kLanes);
  }
}

// The steps that are nearest to a row in floating point, with scales and zeros as they are stored.
void quantize_row(const PackedWeight& weight, const WeightSource& source, int64_t row, const GroupMemory& to) {
  const bool is_int6 = weight.format == WeightFormat::kInt6;
  const int64_t group_size = weight.group_size, num_groups = weight.num_groups();
  for (int64_t input = 0; input < weight.in_features; input += kLanes) {
    store(to.weights + input, load_weights(source, row * weight.in_features + input, weight.in_features - input));
  }
  WeightSource weights{};
  weights.rows = to.weights;
  weights.type = DType::kFloat32;
  for (int64_t group = 0; group < num_groups; ++group) {
    if (is_int6) {
      to.scales[group] = largest_magnitude(weights, group * group_size, group_size) / 31.0f;
      to.zeros[group] = kInt6Zero;
      continue;
    }
    const GroupRange range = best_range(to.weights + group * group_size, group_size);
    to.scales[group] = range.scale;
    to.zeros[group] = range.zero;
  }
  const float unit = unit_of(to.scales, num_groups);
  for (int64_t group = 0; group < num_groups; ++group) {
    const float scale = to_float(from_float<fp16>(to.scales[group] / unit)) * unit;
    const float zero = to_float(from_float<fp16>(to.zeros[group]));
    take_steps({scale, zero, is_int6 ? 63.0f : 15.0f}, to.weights + group * group_size, group_size,
               to.steps + group * group_size);
  }
}

// The steps of a row, in `memory` or where they are already; scales and zeros always come into `memory`.
const uint8_t* grouped_row(const PackedWeight& weight, const WeightSource& source, int64_t row, const GroupMemory& memory) {
  const int64_t num_groups = weight.num_groups();
  if (source.type != DType::kUInt8) {
    quantize_row(weight, source, row, memory);
    return memory.steps;
  }
  const auto* octets = static_cast<const uint8_t*>(source.rows);
  if (source.block != GgmlBlock::kNone) {
    unpack_row(source.block, octets, row, weight, memory);
    return memory.steps;
  }
  std::memcpy(memory.scales, source.scales + row * num_groups, num_groups * sizeof(float));
  std::memcpy(memory.zeros, source.zeros + row * num_groups, num_groups * sizeof(float));
  return octets + row * weight.in_features;
}

// The codes of twice what E2M1 has, by that plus 128.
struct Float4Codes {
  uint8_t codes[256] = {};

  constexpr Float4Codes() {
    for (int twice = -128; twice < 128; ++twice) {
      const int magnitude = twice < 0 ? -twice : twice;
      const int code = magnitude <= 4 ? magnitude : magnitude == 6 ? 5 : magnitude == 8 ? 6 : 7;
      codes[twice + 128] = static_cast<uint8_t>(code | (twice < 0 ? 8 : 0));
    }
  }
};
constexpr Float4Codes kFloat4Codes;

// The codes of a row, in `codes`; its exponents go into the panel. False if one of these is too large.
bool float4_row(const Column& column, const WeightSource& source, int64_t row, uint8_t* codes) {
  const PackedWeight& weight = *column.weight;
  const auto* octets = static_cast<const uint8_t*>(source.rows);
  bool is_finite = true;
  for (int64_t group = 0; group < weight.num_groups(); ++group) {
    const int64_t place = row * weight.num_groups() + group;
    uint8_t* of_group = codes + group * weight.group_size;
    uint8_t exponent;
    if (source.block == GgmlBlock::kMXFP4) {
      const uint8_t* block = octets + place * MXFP4::kBytes;
      take_nibbles<16>(block + 1, of_group);
      const auto found = load_bits<Bytes<32>>(of_group);
      store_bits(of_group, select(found == broadcast<Bytes<32>>(8), Bytes<32>{}, found));  // there is no less than 0
      exponent = block[0];
      is_finite &= exponent <= MXFP4::kMaxExponent;
    } else {
      const int offset = 128 - static_cast<int>(source.zeros[place]);
      for (int64_t i = 0; i < weight.group_size; ++i) {
        of_group[i] = kFloat4Codes.codes[(octets[place * weight.group_size + i] + offset) & 255];
      }
      const float scale = source.scales[place] * 2.0f;
      uint32_t bits;
      std::memcpy(&bits, &scale, sizeof bits);
      exponent = static_cast<uint8_t>(bits >> 23);
    }
    column.panel[group * kPanelColumns + column.index] = static_cast<char>(exponent);
  }
  return is_finite;
}

// The scales of all groups have a unit in common; it goes into the panel as they do.
void store_scales(const Column& column, const GroupMemory& row) {
  const PackedWeight& weight = *column.weight;
  const int64_t num_groups = weight.num_groups();
  const float unit = unit_of(row.scales, num_groups), inverse = 1.0f / unit;
  reinterpret_cast<float*>(column.panel + weight.panel_bytes())[column.index - kPanelColumns] = unit;
  char* to = column.panel + column.index * sizeof(fp16);
  for (int64_t first = 0; first < num_groups; first += kLanes) {
    fp16 scales[kLanes], zeros[kLanes];
    store(scales, load(row.scales + first) * inverse);
    store(zeros, load(row.zeros + first));
    const int64_t count = min(num_groups - first, kLanes);
    for (int64_t i = 0; i < count; ++i, to += weight.group_bytes()) {
      std::memcpy(to, &scales[i], sizeof(fp16));
      if (weight.format != WeightFormat::kInt6) std::memcpy(to + kPanelColumns * sizeof(fp16), &zeros[i], sizeof(fp16));
    }
  }
}

bool is_finite(const GroupMemory& row, int64_t num_groups) {
  f32x16 unsound = {};
  for (int64_t group = 0; group < num_groups; group += kLanes) {
    unsound += (load(row.scales + group) + load(row.zeros + group)) * 0.0f;
  }
  return sum_of_lanes(unsound) == 0.0f;
}

// The steps of a row in groups; null if scales of its blocks are not finite. `room`: see GroupMemory.
const char* grouped_steps(const Column& column, const WeightSource& source, int64_t row, char* room) {
  const PackedWeight& weight = *column.weight;
  const GroupMemory memory(weight, room);
  if (weight.format == WeightFormat::kMxfp4) {
    return float4_row(column, source, row, memory.steps) ? reinterpret_cast<const char*>(memory.steps) : nullptr;
  }
  const uint8_t* steps = grouped_row(weight, source, row, memory);
  if (source.block != GgmlBlock::kNone && !is_finite(memory, weight.num_groups())) return nullptr;
  store_scales(column, memory);
  return reinterpret_cast<const char*>(steps);
}

// Where the row of each column of a panel comes from; null for the columns that only fill up the last panel.
struct Origin {
  const WeightSource* source;
  int64_t row;
};

Origin origin_of(const PackCall& call, int64_t column) {
  if (call.gated_features > 0) {
    const int64_t feature = column / kPanelColumns * kGatedColumns + column % kGatedColumns;
    if (feature >= call.gated_features) return {nullptr, 0};
    column = column % kPanelColumns < kGatedColumns ? feature : call.gated_features + feature;
  }
  for (int64_t i = 0; i < call.num_sources; ++i) {
    if (column < call.sources[i].num_rows) return {&call.sources[i], column};
    column -= call.sources[i].num_rows;
  }
  return {nullptr, 0};
}

// The numbers or the steps of a row: in `buffer`, or where they were; null: scales of its blocks are not finite.
const char* numbers_of(const Column& column, const WeightSource& source, int64_t row, char* buffer) {
  switch (column.weight->format) {
    case WeightFormat::kFloat32: return float_row<float, DType::kFloat32, 1>(*column.weight, source, row, buffer);
    case WeightFormat::kBFloat16: return float_row<bf16, DType::kBFloat16, 2>(*column.weight, source, row, buffer);
    case WeightFormat::kInt8: return int8_row(column, source, row, buffer);
    default: return grouped_steps(column, source, row, buffer);
  }
}

// Bytes that a row takes, with what its groups need.
int64_t row_bytes(const PackedWeight& weight) {
  const int64_t of_groups = 2 * round_up(weight.num_groups(), kLanes) * 4 + (weight.in_groups() ? weight.in_features : 0);
  return of_groups + (weight.in_features + 2 * kLanes) * 4;
}

// Sixteen columns at a time; false if scales of blocks are not finite.
bool pack_lines(const PackCall& call, int64_t panel, char* to, char* buffer) {
  const PackedWeight& weight = *call.weight;
  const int numbers_per_word = weight.format == WeightFormat::kFloat32 ? 1 : weight.format == WeightFormat::kBFloat16 ? 2 : 4;
  for (int half = 0; half < 2; ++half) {
    const char* columns[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int index = half * kLanes + i;
      const int64_t place = panel * kPanelColumns + index;
      const Origin origin = origin_of(call, place);
      const Column column = {&weight, to, index, call.norms == nullptr ? nullptr : call.norms + place};
      char* row = buffer + i * row_bytes(weight);
      if (origin.source == nullptr) {
        std::memset(row, 0, row_bytes(weight));
        columns[i] = row;
      } else {
        columns[i] = numbers_of(column, *origin.source, origin.row, row);
        if (columns[i] == nullptr) return false;
      }
    }
    interleave(columns, ceil_div(weight.in_features, numbers_per_word), weight.format, {weight, to, half});
  }
  return true;
}

// float16, whose steps have half as many: one column after the other.
void pack_float16(const PackCall& call, int64_t panel, char* to, char* buffer) {
  for (int index = 0; index < kPanelColumns; ++index) {
    const Origin origin = origin_of(call, panel * kPanelColumns + index);
    if (origin.source != nullptr) pack_float16_row({call.weight, to, index}, *origin.source, origin.row, buffer);
  }
}

}  // namespace

int64_t pack_scratch(const PackCall& call, int num_threads) {
  return num_threads * round_up(kLanes * row_bytes(*call.weight), kLine);
}

bool pack(const PackCall& call, ThreadPool& pool) {
  const PackedWeight& weight = *call.weight;
  bool is_finite = true;
  const int64_t thread_bytes = pack_scratch(call, 1);
  parallel_for(pool, weight.num_panels(), [&](int64_t panel, int thread) {
    char* to = call.panels + panel * weight.panel_bytes();
    char* buffer = call.scratch + thread * thread_bytes;
    const bool has_gaps = weight.format == WeightFormat::kMxfp4;
    if (has_gaps || origin_of(call, (panel + 1) * kPanelColumns - 1).source == nullptr) std::memset(to, 0, weight.panel_bytes());
    if (weight.format == WeightFormat::kFloat16) {
      pack_float16(call, panel, to, buffer);
    } else if (!pack_lines(call, panel, to, buffer)) {
      __atomic_store_n(&is_finite, false, __ATOMIC_RELAXED);
    }
  });
  return is_finite;
}

}  // namespace quire::QUIRE_ISA
