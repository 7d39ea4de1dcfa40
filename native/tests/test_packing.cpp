// Panels, read number by number as linear.h lays them out, against the matrix that went in: for all formats, sources and
// instruction sets, at sizes with all kinds of rests. Sources are of exactly the size needed.
#include "packing.h"

#include <algorithm>

#include "check.h"

using namespace quire;
using namespace quire::test;

struct Case {
  WeightFormat format;
  int64_t out_features, in_features, group_size;
};

class Panels {
 public:
  Panels(const Kernels& kernels, ThreadPool& pool, const Case& shape, const std::vector<WeightSource>& sources)
      : shape_(shape),
        weight_{shape.format, shape.out_features, shape.in_features, shape.group_size, nullptr},
        memory_(weight_.bytes()) {
    PackCall call{&weight_, memory_.data, sources.data(), static_cast<int64_t>(sources.size()), nullptr};
    Aligned scratch(kernels.pack_scratch(call, pool.num_threads()));
    call.scratch = scratch.data;
    kernels.pack(call, pool);
  }

  // The number of an output and an input as it is stored, in steps if the format has a scale.
  double number(int64_t output, int64_t input) const {
    const int64_t column = output % kPanelColumns;
    switch (shape_.format) {
      case WeightFormat::kFloat32: return at<float>(output, 0, input * kPanelColumns + column);
      case WeightFormat::kBFloat16: return number_of(at<bf16>(output, 0, (input / 2 * kPanelColumns + column) * 2 + input % 2));
      case WeightFormat::kFloat16: return number_of(at<fp16>(output, 0, input * kPanelColumns + column));
      case WeightFormat::kInt8: return at<int8_t>(output, 0, (input / 4 * kPanelColumns + column) * 4 + input % 4);
      case WeightFormat::kInt4:
      case WeightFormat::kGroupedInt8:
      case WeightFormat::kInt6:
      case WeightFormat::kMxfp4: break;
    }
    const int64_t in_group = input % shape_.group_size, steps = group_start(input) + kPanelColumns * 4;
    if (shape_.format == WeightFormat::kGroupedInt8) {
      return at<uint8_t>(output, steps, (in_group / 4 * kPanelColumns + column) * 4 + in_group % 4);
    }
    if (shape_.format == WeightFormat::kInt6) {
      const int64_t first = group_start(input) + kPanelColumns * 2 + in_group / 16 * 6 * kLine + column / 16 * 3 * kLine;
      const int64_t place = column % 16 * 4 + in_group % 4, part = in_group % 16 / 4;
      const int low = at<uint8_t>(output, first + part / 2 * kLine, place) >> part % 2 * 4 & 0xf;
      return low | (at<uint8_t>(output, first + 2 * kLine, place) >> part * 2 & 3) << 4;
    }
    return at<uint16_t>(output, steps, (in_group / 8 * kPanelColumns + column) * 2 + in_group % 2) >> (in_group % 8 / 2 * 4) &
           0xf;
  }
  float scale(int64_t output, int64_t input) const {
    const int64_t column = output % kPanelColumns;
    if (!weight_.in_groups()) return at<float>(output, steps_bytes(), column);
    const float unit = at<float>(output, weight_.panel_bytes() - kPanelColumns * 4, column);
    return static_cast<float>(number_of(at<fp16>(output, group_start(input), column))) * unit;
  }
  float zero(int64_t output, int64_t input) const {
    if (shape_.format == WeightFormat::kInt6) return 32.0f;
    return static_cast<float>(number_of(at<fp16>(output, group_start(input), kPanelColumns + output % kPanelColumns)));
  }
  int32_t sum(int64_t output) const { return at<int32_t>(output, steps_bytes(), kPanelColumns + output % kPanelColumns); }

  // Whether the outputs that fill up the last panel are zeros: by their numbers, or by their scales.
  bool ends_with_zeros() const {
    const bool is_scaled = shape_.format == WeightFormat::kInt8 || weight_.in_groups();
    for (int64_t output = shape_.out_features; output < weight_.num_panels() * kPanelColumns; ++output) {
      for (int64_t input = 0; input < shape_.in_features; ++input) {
        if ((is_scaled ? scale(output, input) : number(output, input)) != 0.0) return false;
      }
    }
    return true;
  }

 private:
  int64_t group_start(int64_t input) const {
    if (shape_.format == WeightFormat::kInt6) return input / shape_.group_size * kPanelColumns * (2 + shape_.group_size * 6 / 8);
    const int64_t bits = shape_.format == WeightFormat::kInt4 ? 4 : 8;
    return input / shape_.group_size * kPanelColumns * (4 + shape_.group_size * bits / 8);
  }
  int64_t steps_bytes() const { return (shape_.in_features + 3) / 4 * kPanelColumns * 4; }
  template <class T>
  T at(int64_t output, int64_t offset, int64_t index) const {
    T value;
    std::memcpy(&value, memory_.data + output / kPanelColumns * weight_.panel_bytes() + offset + index * sizeof(T), sizeof value);
    return value;
  }

  const Case shape_;
  const PackedWeight weight_;
  const Aligned memory_;
};

void check_int8(const Panels& panels, int64_t output, const std::vector<double>& row) {
  const auto is_smaller = [](double a, double b) { return std::fabs(a) < std::fabs(b); };
  const double scale = std::fabs(*std::max_element(row.begin(), row.end(), is_smaller)) / 127.0;
  CHECK(std::fabs(panels.scale(output, 0) - scale) <= 1e-6 * scale, "scale %g, not %g", panels.scale(output, 0), scale);
  int64_t sum = 0;
  for (int64_t input = 0; input < static_cast<int64_t>(row.size()); ++input) {
    const double steps = panels.number(output, input);
    CHECK(std::fabs(steps * scale - row[input]) <= 0.5001 * scale, "%g steps of %g for %g", steps, scale, row[input]);
    sum += static_cast<int64_t>(steps);
  }
  CHECK(sum == panels.sum(output), "sum %d", panels.sum(output));
}

// The squared error of a group whose nearest of 16 steps from low to high are taken.
double squared_error(const double* group, int64_t count, double low, double high) {
  double error = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double step = (high - low) / 15.0;
    const double steps = std::min(std::max(std::nearbyint((group[i] - low) / step), 0.0), 15.0);
    error += std::pow(low + steps * step - group[i], 2.0);
  }
  return error;
}

void check_int4(const Panels& panels, const Case& shape, int64_t output, const std::vector<double>& row) {
  for (int64_t first = 0; first < shape.in_features; first += shape.group_size) {
    const double* group = row.data() + first;
    const double low = std::min(*std::min_element(group, group + shape.group_size), 0.0);
    const double high = std::max(*std::max_element(group, group + shape.group_size), 0.0);
    double least = HUGE_VAL, error = 0.0;
    for (const double share : {1.0, 0.9, 0.8})
      least = std::min(least, squared_error(group, shape.group_size, low * share, high * share));
    for (int64_t i = 0; i < shape.group_size; ++i) {
      const double steps = panels.number(output, first + i);
      error += std::pow((steps - panels.zero(output, first)) * panels.scale(output, first) - group[i], 2.0);
    }
    CHECK(error <= 1.03 * least + 1e-12, "a squared error of %g, not %g", error, least);
  }
}

void check_int6(const Panels& panels, const Case& shape, int64_t output, const std::vector<double>& row) {
  for (int64_t first = 0; first < shape.in_features; first += shape.group_size) {
    double largest = 0.0;
    for (int64_t i = 0; i < shape.group_size; ++i) largest = std::max(largest, std::fabs(row[first + i]));
    for (int64_t i = 0; i < shape.group_size; ++i) {
      const double number = (panels.number(output, first + i) - 32.0) * panels.scale(output, first);
      CHECK(std::fabs(number - row[first + i]) <= 0.52 * largest / 31.0, "%g for %g", number, row[first + i]);
    }
  }
}

template <class T>
void check_floats(const Kernels& kernels, ThreadPool& pool, const Case& shape) {
  const int64_t split = shape.out_features / 3;  // two sources, one below the other
  const std::vector<T> above = random_numbers<T>(split * shape.in_features, 0.1f);
  const std::vector<T> below = random_numbers<T>((shape.out_features - split) * shape.in_features, 0.1f);
  const Panels panels(kernels, pool, shape,
                      {{above.data(), TypeOf<T>::dtype, split, nullptr, nullptr},
                       {below.data(), TypeOf<T>::dtype, shape.out_features - split, nullptr, nullptr}});
  std::vector<T> matrix = above;
  matrix.insert(matrix.end(), below.begin(), below.end());
  for (int64_t output = 0; output < shape.out_features; ++output) {
    std::vector<double> row;
    for (int64_t input = 0; input < shape.in_features; ++input)
      row.push_back(number_of(matrix[output * shape.in_features + input]));
    if (shape.format == WeightFormat::kInt8) {
      check_int8(panels, output, row);
      continue;
    }
    if (shape.format == WeightFormat::kInt4) {
      check_int4(panels, shape, output, row);
      continue;
    }
    if (shape.format == WeightFormat::kInt6) {
      check_int6(panels, shape, output, row);
      continue;
    }
    for (int64_t input = 0; input < shape.in_features; ++input) {
      const float number = static_cast<float>(row[input]);
      const double expected = shape.format == WeightFormat::kBFloat16  ? number_of(from_float<bf16>(number))
                              : shape.format == WeightFormat::kFloat16 ? number_of(from_float<fp16>(number))
                                                                       : number;
      CHECK(panels.number(output, input) == expected, "%s: %g, not %g", kernels.instruction_set, panels.number(output, input),
            expected);
    }
  }
  CHECK(panels.ends_with_zeros(), "%s: the end of the last panel", kernels.instruction_set);
}

// Numbers that float16 can hold, times `factor`.
std::vector<float> random_halves(int64_t count, float factor) {
  std::vector<float> numbers;
  for (const fp16 number : random_numbers<fp16>(count)) numbers.push_back(static_cast<float>(number_of(number)) * factor);
  return numbers;
}

// Steps of a checkpoint that is quantized already stay as they are, and so do scales and zeros, however small or large.
template <class T>
void check_steps(const Kernels& kernels, ThreadPool& pool, const Case& shape, float factor = 1.0f) {
  constexpr bool kIsGrouped = sizeof(T) == 1 && T(-1) > T(0);
  std::vector<T> steps(shape.out_features * shape.in_features);
  const bool is_int6 = shape.format == WeightFormat::kInt6;
  const int highest = shape.format == WeightFormat::kInt4 ? 15 : is_int6 ? 63 : 255;
  for (T& step : steps) step = static_cast<T>(kIsGrouped ? random_int(0, highest) : random_int(-128, 127));
  const int64_t num_groups = kIsGrouped ? shape.in_features / shape.group_size : 1;
  const std::vector<float> scales = random_halves(shape.out_features * num_groups, factor);
  std::vector<float> zeros = random_halves(shape.out_features * num_groups, 8.0f);
  if (is_int6) std::fill(zeros.begin(), zeros.end(), 32.0f);
  const Panels panels(
      kernels, pool, shape,
      {{steps.data(), kIsGrouped ? DType::kUInt8 : DType::kInt8, shape.out_features, scales.data(), zeros.data()}});
  for (int64_t output = 0; output < shape.out_features; ++output) {
    int64_t sum = 0;
    for (int64_t input = 0; input < shape.in_features; ++input) {
      const int64_t group = output * num_groups + (kIsGrouped ? input / shape.group_size : 0);
      const double step = steps[output * shape.in_features + input];
      CHECK(panels.number(output, input) == step, "%s: %g, not %g", kernels.instruction_set, panels.number(output, input), step);
      CHECK(panels.scale(output, input) == scales[group], "%s: a scale", kernels.instruction_set);
      CHECK(!kIsGrouped || panels.zero(output, input) == zeros[group], "%s: a zero", kernels.instruction_set);
      sum += static_cast<int64_t>(step);
    }
    CHECK(kIsGrouped || panels.sum(output) == sum, "%s: a sum", kernels.instruction_set);
  }
  CHECK(panels.ends_with_zeros(), "%s: the end of the last panel", kernels.instruction_set);
}

// A row or group that cannot be quantized is NaN as a whole, and no other is.
void what_is_unsound_stays_so(const Kernels& kernels, ThreadPool& pool, WeightFormat format) {
  const Case shape{format, 3, 64, 32};
  for (const float unsound : {std::nanf(""), HUGE_VALF}) {
    std::vector<float> matrix = random_floats(shape.out_features * shape.in_features);
    matrix[shape.in_features + 5] = unsound;
    const Panels panels(kernels, pool, shape, {{matrix.data(), DType::kFloat32, shape.out_features, nullptr, nullptr}});
    CHECK(std::isnan(panels.scale(1, 5)), "%s: a scale of %g for %g", kernels.instruction_set, panels.scale(1, 5), unsound);
    CHECK(std::isfinite(panels.scale(0, 5)) && std::isfinite(panels.scale(2, 5)), "%s: a NaN spread", kernels.instruction_set);
  }
}

// Blocks are taken apart in the same way on all instruction sets, and those whose scales are not finite are told. That the steps
// are right is for the tests of files, which compare them with what another library reads.
void check_blocks(ThreadPool& pool) {
  struct Kind {
    GgmlBlock block;
    int64_t numbers, bytes, group_size;
    WeightFormat format;
    std::vector<int> halves;  // where a block has float16 numbers
  };
  for (const Kind& kind : std::initializer_list<Kind>{{GgmlBlock::kQ4_0, 32, 18, 32, WeightFormat::kInt4, {0}},
                                                      {GgmlBlock::kQ4_1, 32, 20, 32, WeightFormat::kInt4, {0, 2}},
                                                      {GgmlBlock::kQ5_0, 32, 22, 32, WeightFormat::kInt6, {0}},
                                                      {GgmlBlock::kQ5_1, 32, 24, 32, WeightFormat::kGroupedInt8, {0, 2}},
                                                      {GgmlBlock::kQ8_0, 32, 34, 32, WeightFormat::kGroupedInt8, {0}},
                                                      {GgmlBlock::kQ2_K, 256, 84, 16, WeightFormat::kInt4, {80, 82}},
                                                      {GgmlBlock::kQ3_K, 256, 110, 16, WeightFormat::kInt4, {108}},
                                                      {GgmlBlock::kQ4_K, 256, 144, 32, WeightFormat::kInt4, {0, 2}},
                                                      {GgmlBlock::kQ5_K, 256, 176, 32, WeightFormat::kGroupedInt8, {0, 2}},
                                                      {GgmlBlock::kQ6_K, 256, 210, 16, WeightFormat::kInt6, {208}},
                                                      {GgmlBlock::kIQ4_NL, 32, 18, 32, WeightFormat::kGroupedInt8, {0}},
                                                      {GgmlBlock::kIQ4_XS, 256, 136, 32, WeightFormat::kGroupedInt8, {0}},
                                                      {GgmlBlock::kMXFP4, 32, 17, 32, WeightFormat::kMxfp4, {}}}) {
    const int64_t num_rows = random_int(1, 70), num_blocks = random_int(1, 5);
    const PackedWeight weight = {kind.format, num_rows, num_blocks * kind.numbers, kind.group_size, nullptr};
    std::vector<uint8_t> octets(num_rows * num_blocks * kind.bytes);
    for (uint8_t& octet : octets) octet = static_cast<uint8_t>(random_int(0, 255));
    const auto set_half = [&](int64_t block, int at, float number) {
      const fp16 half = from_float<fp16>(number);
      std::memcpy(octets.data() + block * kind.bytes + at, &half, sizeof half);
    };
    for (int64_t block = 0; block < num_rows * num_blocks; ++block) {
      for (const int at : kind.halves) set_half(block, at, random_int(0, 9) == 0 ? 0.0f : random_floats(1)[0]);
      if (kind.format == WeightFormat::kMxfp4) octets[block * kind.bytes] = static_cast<uint8_t>(random_int(0, 252));
    }
    const WeightSource source = {octets.data(), DType::kUInt8, num_rows, nullptr, nullptr, kind.block};
    std::vector<char> expected;
    for (int turn = 0; turn < 2; ++turn) {
      for (const Kernels* kernels : all_kernels()) {
        Aligned panels(weight.bytes());
        PackCall call{&weight, panels.data, &source, 1, nullptr};
        Aligned scratch(kernels->pack_scratch(call, pool.num_threads()));
        call.scratch = scratch.data;
        const bool is_finite = kernels->pack(call, pool);
        CHECK(is_finite == (turn == 0), "%s: block %d is%s finite", kernels->instruction_set, static_cast<int>(kind.block),
              is_finite ? "" : " not");
        if (turn == 1) continue;
        if (expected.empty()) expected.assign(panels.data, panels.data + weight.bytes());
        CHECK(std::memcmp(expected.data(), panels.data, weight.bytes()) == 0, "%s: block %d", kernels->instruction_set,
              static_cast<int>(kind.block));
      }
      const int64_t block = random_int(0, num_rows * num_blocks - 1);
      const int64_t last = static_cast<int64_t>(kind.halves.size()) - 1;
      if (last < 0) {
        octets[block * kind.bytes] = static_cast<uint8_t>(random_int(253, 255));
      } else {
        set_half(block, kind.halves[random_int(0, last)], random_int(0, 1) ? HUGE_VALF : std::nanf(""));
      }
    }
  }
}

int main() {
  ThreadPool pool(3);
  for (int turn = 0; turn < 8; ++turn) check_blocks(pool);
  for (const Kernels* kernels : all_kernels()) {
    for (int turn = 0; turn < 8; ++turn) {
      const int64_t in_features = turn < 2 ? turn + 1 : random_int(1, 150), out_features = random_int(3, 100);
      const int64_t group_size = turn % 2 ? 32 : 128;
      for (const WeightFormat format :
           {WeightFormat::kFloat32, WeightFormat::kBFloat16, WeightFormat::kFloat16, WeightFormat::kInt8}) {
        const Case shape{format, out_features, in_features, 0};
        check_floats<float>(*kernels, pool, shape);
        check_floats<bf16>(*kernels, pool, shape);
        check_floats<fp16>(*kernels, pool, shape);
      }
      check_steps<int8_t>(*kernels, pool, {WeightFormat::kInt8, out_features, in_features, 0});
      const Case in_groups{WeightFormat::kInt4, out_features, group_size * random_int(1, 3), group_size};
      check_floats<float>(*kernels, pool, in_groups);
      check_floats<bf16>(*kernels, pool, in_groups);
      const Case in_int6{WeightFormat::kInt6, out_features, in_groups.in_features, group_size / 2};
      check_floats<float>(*kernels, pool, in_int6);
      for (const float factor : {1.0f, 0x1p-100f, 0x1p100f}) {
        check_steps<uint8_t>(*kernels, pool, in_groups, factor);
        check_steps<uint8_t>(*kernels, pool, in_int6, factor);
        check_steps<uint8_t>(*kernels, pool, {WeightFormat::kGroupedInt8, out_features, in_groups.in_features, group_size},
                             factor);
      }
    }
    what_is_unsound_stays_so(*kernels, pool, WeightFormat::kInt8);
    what_is_unsound_stays_so(*kernels, pool, WeightFormat::kInt4);
    what_is_unsound_stays_so(*kernels, pool, WeightFormat::kInt6);
  }
}
