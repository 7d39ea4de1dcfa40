// Experts against plain loops in double, for formats of all kinds and all instruction sets; and rows that are equal bit for bit
// alone, in company, and on any number of threads.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "check.h"

using namespace quire;
using namespace quire::test;

struct Shape {
  WeightFormat format;
  int64_t hidden, inner, num_experts, num_chosen, group_size;
};

// Matrices of all experts in bf16, and packed.
struct Matrices {
  PackedWeight weight;
  std::vector<std::vector<bf16>> numbers;
  std::vector<std::unique_ptr<Aligned>> memory;
  std::vector<const char*> panels;

  Matrices(const Kernels& kernels, ThreadPool& pool, const Shape& shape, int64_t rows, int64_t inputs, int64_t gated_features)
      : weight{shape.format, gated_features ? round_up(gated_features, kGatedColumns) * 2 : rows,
               inputs,       shape.group_size,
               nullptr,      shape.group_size > 0} {
    for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
      numbers.push_back(to_bf16(random_floats(rows * inputs, 0.3f)));
      memory.push_back(std::make_unique<Aligned>(weight.bytes()));
      panels.push_back(memory.back()->data);
      const WeightSource source{numbers.back().data(), DType::kBFloat16, rows, nullptr, nullptr};
      PackCall call{&weight, memory.back()->data, &source, 1, nullptr, gated_features};
      Aligned scratch(kernels.pack_scratch(call, pool.num_threads()));
      call.scratch = scratch.data;
      kernels.pack(call, pool);
    }
  }

  double product(int64_t expert, int64_t output, const std::vector<double>& row) const {
    double sum = 0.0;
    for (size_t input = 0; input < row.size(); ++input) {
      sum += to_float(numbers[expert][output * row.size() + input]) * row[input];
    }
    return sum;
  }
};

void check_shape(const Kernels& kernels, ThreadPool& pool, ThreadPool& one_thread, const Shape& shape, int64_t num_rows) {
  const Matrices gate_up(kernels, pool, shape, 2 * shape.inner, shape.hidden, shape.inner);
  const Matrices down(kernels, pool, shape, shape.hidden, shape.inner, 0);
  const std::vector<bf16> rows = to_bf16(random_floats(num_rows * shape.hidden));
  const std::vector<float> bias = random_floats(shape.num_experts * shape.hidden);
  const std::vector<float> weights = random_floats(num_rows * shape.num_chosen);
  std::vector<int64_t> chosen;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t first = random_int(0, shape.num_experts - 1);
    for (int64_t i = 0; i < shape.num_chosen; ++i) chosen.push_back((first + i) % shape.num_experts);
  }
  const auto computed = [&](ThreadPool& threads, int64_t first, int64_t count) {
    const std::vector<bf16> own(rows.begin() + first * shape.hidden, rows.begin() + (first + count) * shape.hidden);
    std::vector<float> out(count * shape.hidden, std::nanf(""));
    ExpertsCall call{&gate_up.weight,
                     &down.weight,
                     gate_up.panels.data(),
                     down.panels.data(),
                     nullptr,
                     bias.data(),
                     shape.num_experts,
                     Activation::kSilu,
                     own.data(),
                     DType::kBFloat16,
                     shape.hidden,
                     count,
                     chosen.data() + first * shape.num_chosen,
                     weights.data() + first * shape.num_chosen,
                     shape.num_chosen,
                     out.data(),
                     DType::kFloat32,
                     shape.hidden,
                     nullptr};
    Aligned scratch(experts_scratch(call));
    call.scratch = scratch.data;
    experts(call, kernels, threads);
    return out;
  };

  const std::vector<float> out = computed(pool, 0, num_rows);
  double error = 0.0, size = 0.0;
  for (int64_t row = 0; row < num_rows; ++row) {
    std::vector<double> inputs, results(shape.hidden);
    for (int64_t i = 0; i < shape.hidden; ++i) inputs.push_back(to_float(rows[row * shape.hidden + i]));
    for (int64_t i = 0; i < shape.num_chosen; ++i) {
      const int64_t expert = chosen[row * shape.num_chosen + i];
      std::vector<double> inner;
      for (int64_t feature = 0; feature < shape.inner; ++feature) {
        const double gate = gate_up.product(expert, feature, inputs);
        inner.push_back(gate / (1.0 + std::exp(-gate)) * gate_up.product(expert, shape.inner + feature, inputs));
      }
      for (int64_t feature = 0; feature < shape.hidden; ++feature) {
        results[feature] +=
            weights[row * shape.num_chosen + i] * (down.product(expert, feature, inner) + bias[expert * shape.hidden + feature]);
      }
    }
    for (int64_t i = 0; i < shape.hidden; ++i) {
      error += std::pow(out[row * shape.hidden + i] - results[i], 2.0);
      size += std::pow(results[i], 2.0);
    }
  }
  const double share = shape.format == WeightFormat::kInt4 ? 0.2 : shape.format == WeightFormat::kInt8 ? 0.03 : 0.01;
  CHECK(std::sqrt(error / size) <= share, "%s, format %d: an error of %g", kernels.instruction_set,
        static_cast<int>(shape.format), std::sqrt(error / size));

  const int64_t count = random_int(1, num_rows), first = random_int(0, num_rows - count);
  const std::vector<float> some = computed(one_thread, first, count);
  CHECK(std::equal(some.begin(), some.end(), out.begin() + first * shape.hidden), "%s, format %d: %ld rows differ in company",
        kernels.instruction_set, static_cast<int>(shape.format), static_cast<long>(count));
}

int main() {
  ThreadPool pool(3), one_thread(1);
  for (const Kernels* kernels : all_kernels()) {
    for (const WeightFormat format :
         {WeightFormat::kFloat32, WeightFormat::kBFloat16, WeightFormat::kInt8, WeightFormat::kInt4}) {
      for (int turn = 0; turn < 4; ++turn) {
        const int64_t group_size = format == WeightFormat::kInt4 ? 16 : 0, unit = group_size ? group_size : 1;
        const int64_t num_experts = random_int(1, 6);
        check_shape(
            *kernels, pool, one_thread,
            {format, unit * random_int(1, 5), unit * random_int(1, 5), num_experts, random_int(1, num_experts), group_size},
            random_int(1, 150));
      }
    }
    std::printf("%s: experts as exact as the formats allow\n", kernels->instruction_set);
  }
}
