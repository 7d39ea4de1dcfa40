// Packed products against plain loops in double, for all formats and instruction sets, at sizes with all kinds of rests; and
// rows that are equal bit for bit alone, in company, and on any number of threads.
#include "linear.h"

#include <algorithm>
#include <cmath>

#include "check.h"

using namespace quire;
using namespace quire::test;

struct Case {
  WeightFormat format;
  int64_t out_features, in_features, num_rows, group_size;
  bool has_int8_rows;
};

// In float32, so that a difference in the last place shows.
std::vector<float> multiply(const Kernels& kernels, ThreadPool& pool, const PackedWeight& weight, const std::vector<bf16>& rows,
                            int64_t first, int64_t count, const std::vector<float>& bias) {
  std::vector<float> out(count * weight.out_features, std::nanf(""));
  Aligned scratch(LinearScratch(weight, count).total);
  // Exactly as many rows as asked for, in memory of their own.
  const std::vector<bf16> own(rows.begin() + first * weight.in_features, rows.begin() + (first + count) * weight.in_features);
  kernels.linear({&weight, own.data(), DType::kBFloat16, weight.in_features, count, bias.data(), out.data(), DType::kFloat32,
                  weight.out_features, scratch.data},
                 pool);
  return out;
}

// A matrix as it is packed: in bf16, or in bytes, and the numbers that it stands for.
struct Matrix {
  std::vector<bf16> floats;
  std::vector<uint8_t> steps;
  std::vector<float> scales, zeros;  // of groups
  std::vector<double> numbers;

  explicit Matrix(const Case& shape) {
    const int64_t count = shape.out_features * shape.in_features;
    const bool is_mxfp4 = shape.format == WeightFormat::kMxfp4, is_int6 = shape.format == WeightFormat::kInt6;
    if (shape.format != WeightFormat::kGroupedInt8 && !is_mxfp4 && !(is_int6 && random_int(0, 1))) {
      floats = to_bf16(random_floats(count, 0.1f));
      for (const bf16 number : floats) numbers.push_back(to_float(number));
      return;
    }
    for (int64_t group = 0; group < count / shape.group_size; ++group) {
      scales.push_back(is_mxfp4 ? std::ldexp(1.0f, static_cast<int>(random_int(-12, -8)))
                                : 0x1p-14f * static_cast<float>(random_int(1, 15)));
      zeros.push_back(static_cast<float>(is_mxfp4 ? 128 : is_int6 ? 32 : random_int(0, 255)));
    }
    for (int64_t i = 0; i < count; ++i) {
      constexpr int kDoubles[] = {0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12};  // of E2M1
      const int64_t largest = is_mxfp4 ? 140 : is_int6 ? 63 : 255;
      const int64_t any = is_mxfp4 ? 128 + kDoubles[random_int(0, 14)] : random_int(0, largest);
      steps.push_back(static_cast<uint8_t>(random_int(0, 3) ? any : largest));  // the largest sums, too
      const int64_t group = i / shape.group_size;
      numbers.push_back((steps[i] - zeros[group]) * static_cast<double>(scales[group]));
    }
  }

  WeightSource source(const Case& shape, int64_t first, int64_t count) const {
    const int64_t place = first * shape.in_features;
    if (steps.empty()) return {floats.data() + place, DType::kBFloat16, count, nullptr, nullptr};
    const int64_t group = place / shape.group_size;
    return {steps.data() + place, DType::kUInt8, count, scales.data() + group, zeros.data() + group};
  }
};

void check_case(const Kernels& kernels, ThreadPool& pool, ThreadPool& one_thread, const Case& shape) {
  const Matrix matrix(shape);
  const std::vector<bf16> rows = to_bf16(random_floats(shape.num_rows * shape.in_features));
  const std::vector<float> bias = random_floats(shape.out_features);
  PackedWeight weight{shape.format, shape.out_features, shape.in_features, shape.group_size, nullptr, shape.has_int8_rows};
  Aligned panels(weight.bytes());
  weight.panels = panels.data;
  const int64_t split = shape.out_features / 3;  // two sources, one below the other
  const WeightSource sources[] = {matrix.source(shape, 0, split), matrix.source(shape, split, shape.out_features - split)};
  PackCall packing{&weight, panels.data, sources, 2, nullptr};
  Aligned room(kernels.pack_scratch(packing, pool.num_threads()));
  packing.scratch = room.data;
  kernels.pack(packing, pool);
  const std::vector<float> out = multiply(kernels, pool, weight, rows, 0, shape.num_rows, bias);

  for (int64_t row = 0; row < shape.num_rows; ++row) {
    for (int64_t column = 0; column < shape.out_features; ++column) {
      double exact = bias[column], magnitude = std::abs(exact), inputs = 0.0, weights = 0.0, largest_input = 0.0,
             largest_weight = 0.0;
      for (int64_t input = 0; input < shape.in_features; ++input) {
        const double number = to_float(rows[row * shape.in_features + input]);
        const double factor = matrix.numbers[column * shape.in_features + input];
        exact += number * factor;
        magnitude += std::abs(number * factor);
        inputs += std::abs(number);
        weights += std::abs(factor);
        largest_input = std::max(largest_input, std::abs(number));
        largest_weight = std::max(largest_weight, std::abs(factor));
      }
      const double got = out[row * shape.out_features + column];
      // Quantized numbers are off by half a step, in 4 bits by a whole one where the largest of the other sign is cut off.
      const bool is_int4 = shape.format == WeightFormat::kInt4, is_int8 = shape.format == WeightFormat::kInt8;
      const double weight_error = is_int4                                                       ? largest_weight / 8
                                  : is_int8                                                     ? largest_weight / 254
                                  : shape.format == WeightFormat::kInt6 && matrix.steps.empty() ? largest_weight / 62
                                                                                                : 0.0;
      const double input_error = is_int8 || shape.has_int8_rows ? largest_input / 254 : 0.0;
      const double rounding = inputs * weight_error + weights * input_error + shape.in_features * weight_error * input_error;
      const double bound = std::abs(exact) / 128 + rounding / 64 + magnitude * 1e-5 + rounding + 1e-3;
      CHECK(std::abs(got - exact) <= bound, "%s, format %d: %g instead of %g, %ld x %ld", kernels.instruction_set,
            static_cast<int>(shape.format), got, exact, static_cast<long>(shape.out_features),
            static_cast<long>(shape.in_features));
    }
  }

  for (const int64_t count : {int64_t{1}, random_int(1, shape.num_rows)}) {
    const int64_t first = random_int(0, shape.num_rows - count);
    const std::vector<float> some = multiply(kernels, one_thread, weight, rows, first, count, bias);
    const bool is_same = std::memcmp(some.data(), &out[first * shape.out_features], some.size() * sizeof(float)) == 0;
    CHECK(is_same, "%s, format %d: %ld rows from %ld differ from the same among %ld", kernels.instruction_set,
          static_cast<int>(shape.format), static_cast<long>(count), static_cast<long>(first), static_cast<long>(shape.num_rows));
  }
}

int main() {
  ThreadPool pool(3), one_thread(1);
  for (const Kernels* kernels : all_kernels()) {
    for (const WeightFormat format :
         {WeightFormat::kFloat32, WeightFormat::kBFloat16, WeightFormat::kFloat16, WeightFormat::kInt8, WeightFormat::kInt4,
          WeightFormat::kGroupedInt8, WeightFormat::kMxfp4, WeightFormat::kInt6}) {
      const bool in_groups = format >= WeightFormat::kInt4, is_mxfp4 = format == WeightFormat::kMxfp4;
      for (int turn = 0; turn < (in_groups ? 24 : 12); ++turn) {
        const int64_t group_size = is_mxfp4 ? 32 : in_groups ? int64_t{16} << turn % 4 : 0;
        const int64_t in_features = group_size ? group_size * random_int(1, 3) : random_int(1, 300);
        const bool has_int8_rows = in_groups && turn % 8 >= 4;
        check_case(*kernels, pool, one_thread,
                   {format, random_int(3, 200), in_features, random_int(1, 80), group_size, has_int8_rows});
      }
    }
    std::printf("%s: as exact as the formats allow\n", kernels->instruction_set);
  }
}
