// See packing.h. Compiled once for each instruction set.
#include "packing.h"

#include "group_panels.h"
#include "simd.h"
#include "transpose.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kRangeShares[] = {1.0f, 0.9f, 0.8f};  // of a group's range that 16 steps may span
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

// Puts 32 bits of each of sixteen columns side by side, for every line.
void interleave(const char* const (&columns)[kLanes], int64_t num_lines, Lines to) {
  for (int64_t first = 0; first < num_lines; first += kLanes) {
    const int64_t count = min(num_lines - first, kLanes);
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
    for (int64_t i = 0; i < count; ++i) store_bits(to.next(), lines[i]);
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

  QUIRE_INLINE f32x16 steps_of(f32x16 weights) const {
    const f32x16 steps = weights * (scale > 0.0f ? 1.0f / scale : 0.0f) + zero;
    return minimum(maximum(steps, f32x16{}), splat(last)) + kRound;  // rounded, in the low bits
  }
  QUIRE_INLINE f32x16 errors_of(f32x16 weights) const { return (steps_of(weights) - kRound - zero) * scale - weights; }
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
  GroupRange best = {(high - low) / 15.0f + sum_of_lanes(unsound), 0.0f};
  float least = __builtin_inff();
  for (const float share : kRangeShares) {
    const float scale = (high - low) * share / 15.0f;
    if (!(scale > 0.0f)) continue;
    const GroupRange range = {scale, -low * share / scale};
    f32x16 sum = {};
    for (int64_t input = 0; input < count; input += kLanes) {
      const f32x16 error = range.errors_of(load(weights + input));
      sum += error * error;
    }
    const float error = sum_of_lanes(sum);
    if (error < least) {
      least = error;
      best = range;
    }
  }
  return best;
}

// The power of two that scales are stored as multiples of: the largest finite one becomes 2^14 to 2^15.
float unit_of(const float* scales, int64_t count) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = __builtin_fabsf(scales[i]);
    if (magnitude > largest && magnitude < __builtin_inff()) largest = magnitude;
  }
  if (largest == 0.0f) return 1.0f;
  const int exponent = __builtin_ilogbf(largest) - 14;
  return __builtin_ldexpf(1.0f, exponent < -126 ? -126 : exponent);
}

// A row in groups: a step in each byte, and what the steps of each group stand for.
struct GroupedRow {
  const uint8_t* steps;  // [in_features]
  const float* scales;   // [num_groups]
  const float* zeros;    // [num_groups]
};

// Memory for a row in groups.
struct GroupMemory {
  float* weights;  // [group_size]
  float* scales;   // [num_groups]
  float* zeros;    // [num_groups]
  uint8_t* steps;  // [in_features]

  GroupMemory(const PackedWeight& weight, char* buffer) {
    weights = reinterpret_cast<float*>(buffer);
    scales = weights + weight.group_size;
    zeros = scales + weight.num_groups();
    steps = reinterpret_cast<uint8_t*>(zeros + weight.num_groups());
  }
};

// The numbers of a group as floats; rows of a floating-point type.
void load_group(const PackedWeight& weight, const WeightSource& source, int64_t place, float* weights) {
  for (int64_t input = 0; input < weight.group_size; input += kLanes) {
    store(weights + input, load_weights(source, place + input, weight.group_size - input));
  }
}

void take_steps(GroupRange range, const float* weights, int64_t count, uint8_t* steps) {
  for (int64_t input = 0; input < count; input += kLanes) {
    const i32x16 rounded = bits_as<i32x16>(range.steps_of(load(weights + input))) - bits_as<i32x16>(splat(kRound));
    const i8x16 bytes = low_bytes(rounded);
    std::memcpy(steps + input, &bytes, kLanes);
  }
}

// The steps that are nearest to a row in floating point, with scales and zeros as they are stored.
GroupedRow quantized_row(const PackedWeight& weight, const WeightSource& source, int64_t row, const GroupMemory& memory) {
  const bool is_int6 = weight.format == WeightFormat::kInt6;
  const int64_t group_size = weight.group_size, num_groups = weight.num_groups(), start = row * weight.in_features;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t place = start + group * group_size;
    if (is_int6) {
      memory.scales[group] = largest_magnitude(source, place, group_size) / 31.0f;
      memory.zeros[group] = kInt6Zero;
      continue;
    }
    load_group(weight, source, place, memory.weights);
    const GroupRange range = best_range(memory.weights, group_size);
    memory.scales[group] = range.scale;
    memory.zeros[group] = range.zero;
  }
  const float unit = unit_of(memory.scales, num_groups);
  for (int64_t group = 0; group < num_groups; ++group) {
    load_group(weight, source, start + group * group_size, memory.weights);
    const float scale = to_float(from_float<fp16>(memory.scales[group] / unit)) * unit;
    const float zero = to_float(from_float<fp16>(memory.zeros[group]));
    take_steps({scale, zero, is_int6 ? 63.0f : 15.0f}, memory.weights, group_size, memory.steps + group * group_size);
  }
  return {memory.steps, memory.scales, memory.zeros};
}

GroupedRow grouped_row(const PackedWeight& weight, const WeightSource& source, int64_t row, const GroupMemory& memory) {
  if (source.type != DType::kUInt8) return quantized_row(weight, source, row, memory);
  const int64_t place = row * weight.num_groups();
  return {static_cast<const uint8_t*>(source.rows) + row * weight.in_features, source.scales + place, source.zeros + place};
}

// Eight steps in 4 bits each: those with even numbers, then those with odd ones.
void store_int4_words(const uint8_t* steps, int64_t count, char* to) {
  for (int64_t octet = 0; octet < count / 8; ++octet) {
    uint64_t of;
    std::memcpy(&of, steps + octet * 8, sizeof of);
    const auto quad = [](uint64_t bytes) {
      bytes &= 0x000f000f000f000f;
      bytes |= bytes >> 12;
      return (bytes & 0xff) | (bytes >> 24 & 0xff00);
    };
    const uint32_t word = static_cast<uint32_t>(quad(of) | quad(of >> 8) << 16);
    std::memcpy(to + octet * 4, &word, sizeof word);
  }
}

void store_int6_words(const uint8_t* steps, int64_t count, char* to) {
  for (int64_t unit = 0; unit < count / 16; ++unit) {
    uint32_t quads[4];
    std::memcpy(quads, steps + unit * 16, sizeof quads);
    const auto low = [&](int quad) { return quads[quad] & 0x0f0f0f0f; };
    const auto high = [&](int quad) { return quads[quad] >> 4 & 0x03030303; };
    const uint32_t words[3] = {low(0) | low(1) << 4, low(2) | low(3) << 4, high(0) | high(1) << 2 | high(2) << 4 | high(3) << 6};
    std::memcpy(to + unit * sizeof words, words, sizeof words);
  }
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

// The exponents go into the panel.
const char* float4_words(const Column& column, const GroupedRow& row, const GroupMemory& memory, char* buffer) {
  const PackedWeight& weight = *column.weight;
  for (int64_t group = 0; group < weight.num_groups(); ++group) {
    const int offset = 128 - static_cast<int>(row.zeros[group]);
    for (int64_t i = group * weight.group_size; i < (group + 1) * weight.group_size; ++i) {
      memory.steps[i] = kFloat4Codes.codes[(row.steps[i] + offset) & 255];
    }
    const float scale = row.scales[group] * 2.0f;
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    column.panel[group * kPanelColumns + column.index] = static_cast<char>(bits >> 23);
  }
  store_int4_words(memory.steps, weight.in_features, buffer);
  return buffer;
}

// The scales of all groups have a unit in common; it goes into the panel as they do.
void store_scales(const Column& column, const GroupedRow& row) {
  const PackedWeight& weight = *column.weight;
  const int64_t num_groups = weight.num_groups();
  const float unit = unit_of(row.scales, num_groups);
  reinterpret_cast<float*>(column.panel + weight.panel_bytes())[column.index - kPanelColumns] = unit;
  for (int64_t group = 0; group < num_groups; ++group) {
    fp16* scales = reinterpret_cast<fp16*>(column.panel + group * weight.group_bytes());
    scales[column.index] = from_float<fp16>(row.scales[group] / unit);
    if (weight.format != WeightFormat::kInt6) scales[kPanelColumns + column.index] = from_float<fp16>(row.zeros[group]);
  }
}

// The lines of a row: in `buffer`, or where they are already. `room`: see GroupMemory.
const char* grouped_lines(const Column& column, const WeightSource& source, int64_t row, char* buffer, char* room) {
  const PackedWeight& weight = *column.weight;
  const GroupMemory memory(weight, room);
  const GroupedRow grouped = grouped_row(weight, source, row, memory);
  if (weight.format == WeightFormat::kMxfp4) return float4_words(column, grouped, memory, buffer);
  store_scales(column, grouped);
  switch (weight.format) {
    case WeightFormat::kInt4: store_int4_words(grouped.steps, weight.in_features, buffer); break;
    case WeightFormat::kInt6: store_int6_words(grouped.steps, weight.in_features, buffer); break;
    default: std::memcpy(buffer, grouped.steps, weight.in_features);
  }
  return buffer;
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

const char* lines_of(const Column& column, const WeightSource& source, int64_t row, char* buffer, char* room) {
  switch (column.weight->format) {
    case WeightFormat::kFloat32: return float_row<float, DType::kFloat32, 1>(*column.weight, source, row, buffer);
    case WeightFormat::kBFloat16: return float_row<bf16, DType::kBFloat16, 2>(*column.weight, source, row, buffer);
    case WeightFormat::kInt8: return int8_row(column, source, row, buffer);
    default: return grouped_lines(column, source, row, buffer, room);
  }
}

// How many times 32 bits a column has in a panel, beside scales and the like.
int64_t lines_per_column(const PackedWeight& weight) {
  switch (weight.format) {
    case WeightFormat::kFloat32: return weight.in_features;
    case WeightFormat::kBFloat16: return ceil_div(weight.in_features, 2);
    case WeightFormat::kInt6: return weight.in_features / 16 * 3;
    case WeightFormat::kInt4:
    case WeightFormat::kMxfp4: return weight.in_features / 8;
    default: return ceil_div(weight.in_features, 4);
  }
}

// Sixteen columns at a time.
void pack_lines(const PackCall& call, int64_t panel, char* to, char* buffer) {
  const PackedWeight& weight = *call.weight;
  const int64_t num_lines = lines_per_column(weight);
  const int64_t row_bytes = (weight.in_features + 2 * kLanes) * 4;
  char* room = buffer + kLanes * row_bytes;
  for (int half = 0; half < 2; ++half) {
    const char* columns[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int index = half * kLanes + i;
      const int64_t place = panel * kPanelColumns + index;
      const Origin origin = origin_of(call, place);
      const Column column = {&weight, to, index, call.norms == nullptr ? nullptr : call.norms + place};
      char* row = buffer + i * row_bytes;
      if (origin.source == nullptr) {
        std::memset(row, 0, row_bytes);
        columns[i] = row;
      } else {
        columns[i] = lines_of(column, *origin.source, origin.row, row, room);
      }
    }
    interleave(columns, num_lines, {weight, to, half});
  }
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
  return num_threads * round_up((kLanes + 2) * (call.weight->in_features + 2 * kLanes) * 4, kLine);
}

void pack(const PackCall& call, ThreadPool& pool) {
  const PackedWeight& weight = *call.weight;
  const int64_t thread_bytes = pack_scratch(call, 1);
  parallel_for(pool, weight.num_panels(), [&](int64_t panel, int thread) {
    char* to = call.panels + panel * weight.panel_bytes();
    char* buffer = call.scratch + thread * thread_bytes;
    const bool has_gaps = weight.format == WeightFormat::kMxfp4;
    if (has_gaps || origin_of(call, (panel + 1) * kPanelColumns - 1).source == nullptr) std::memset(to, 0, weight.panel_bytes());
    if (weight.format == WeightFormat::kFloat16) {
      pack_float16(call, panel, to, buffer);
    } else {
      pack_lines(call, panel, to, buffer);
    }
  });
}

}  // namespace quire::QUIRE_ISA
